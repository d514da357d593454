"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered a unit at a time."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from evenstep.strategies.strategy import Strategy, units_of


@final
class Fsdp(Strategy):
    """torch's `fully_shard`."""

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        world: int,
        device: torch.device,
        *,
        units: Iterable[nn.Module] | None,
        gathered: torch.dtype | None,
    ) -> None:
        super().__init__(model, rank, world, device)
        mesh = init_device_mesh(device.type, (world,))
        # half-precision weights halve what travels; gradients are summed in full. autocast casts the inputs
        policy = MixedPrecisionPolicy(
            param_dtype=gathered, reduce_dtype=torch.float32 if gathered else None, cast_forward_inputs=False
        )
        for unit in units_of(model, units):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(sync)
        return nullcontext()
