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
        if world > 2 and device.type == "cpu" and not unused_parameters:
            self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Let DDP have seen the gradients come once, so that it sorts them into buckets before the first step.

        By itself it does so after it. In which order gloo adds more than two numbers depends on their place in a
        bucket: a resumed training's first step would differ, in the last digit, from the undisturbed one's.
        """
        learnt = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.ddp.reducer.prepare_for_backward([])
        for parameter in reversed(learnt):
            (parameter * 0.0).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in learnt:
            parameter.grad = None

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        return nullcontext() if sync else self.ddp.no_sync()
