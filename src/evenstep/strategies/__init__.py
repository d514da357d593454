"""One process, DataParallel, DDP and FSDP behind one contract."""

from collections.abc import Iterable

import torch
from torch import nn

from evenstep.errors import UserError
from evenstep.strategies.strategy import Strategy
from evenstep.world import World


def make(
    name: str,
    model: nn.Module,
    world: World,
    device: torch.device,
    *,
    units: Iterable[nn.Module] | None = None,
    gathered: torch.dtype | None = None,
    unused_parameters: bool = False,
) -> Strategy:
    """The strategy of that name around a model that is on the device."""
    place = (world.rank, world.size, device)
    match name:
        case "one":
            from evenstep.strategies.local import One

            return One(model, *place)
        case "dp":
            from evenstep.strategies.local import DataParallel

            return DataParallel(model, *place)
        case "ddp":
            from evenstep.strategies.ddp import Ddp

            return Ddp(model, *place, unused_parameters=unused_parameters)
        case "fsdp":
            from evenstep.strategies.fsdp import Fsdp

            if unused_parameters and world.size > 1:
                raise UserError(
                    "strategy fsdp gathers a model's parameters in the same order on all ranks, and this task "
                    "says that steps leave some out (unused_parameters); take ddp"
                )
            return Fsdp(model, *place, units=units, gathered=gathered)
    raise ValueError(f"no strategy {name}")
