"""One process: on one device, or through DataParallel on all devices of the machine."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from evenstep.strategies.strategy import Strategy


@final
class One(Strategy):
    """The plain model on one device."""

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        del sync
        return nullcontext()


@final
class DataParallel(Strategy):
    """torch's DataParallel: one process, the batch scattered over its devices (without any: like One)."""

    def __init__(self, model: nn.Module, rank: int, world: int, device: torch.device) -> None:
        super().__init__(model, rank, world, device)
        self.called = nn.DataParallel(model)

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        del sync
        return nullcontext()
