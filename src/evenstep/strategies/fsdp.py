"""FSDP2: parameters, gradients and optimizer state sharded over the ranks, gathered a unit at a time."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from evenstep.strategies.strategy import Strategy, has_parameters, units_of

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


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
        if world > 1:  # as DDP does: whatever the model's author drew them from, rank 0's weights are everyone's
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        mesh = init_device_mesh(device.type, (world,))
        # half-precision weights halve what travels; gradients are summed in full. autocast casts the inputs
        policy = MixedPrecisionPolicy(
            param_dtype=gathered, reduce_dtype=torch.float32 if gathered else None, cast_forward_inputs=False
        )
        parts = units_of(model, units)
        if gathered:  # norms want weights of their input's kind, or full ones: they stay full by themselves
            full = MixedPrecisionPolicy(cast_forward_inputs=False)
            norms = [part for part in model.modules() if isinstance(part, NORMS) and has_parameters(part)]
            parts = [part for part in parts if part not in norms]
            for norm in norms:
                fully_shard(norm, mesh=mesh, mp_policy=full)
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(sync)
        return nullcontext()
