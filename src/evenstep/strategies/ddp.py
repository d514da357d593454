"""DistributedDataParallel: a whole model on each rank, gradients averaged as backward produces them."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.strategies.strategy import Strategy

# the argument's name has changed with torch 2.13
_NAMES = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
NO_SYNC: dict[str, Any] = {SYNC_BUFFERS: False}  # `settle` does it when somebody looks, not at every step


@final
class Ddp(Strategy):
    """torch's DDP."""

    def __init__(
        self, model: nn.Module, rank: int, world: int, device: torch.device, *, unused_parameters: bool
    ) -> None:
        super().__init__(model, rank, world, device)
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=unused_parameters,
            gradient_as_bucket_view=True,
            **NO_SYNC,
        )
        self.called = self.ddp

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        return nullcontext() if sync else self.ddp.no_sync()
