"""Checks that ranks make together: several per launch, since starting the ranks is what takes the time.

A check gathers what it needs first and asserts last, so that a rank where it fails is still there for the
next check.
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from evenstep.config import Config
from evenstep.launch import local
from evenstep.training import together
from evenstep.world import World

CPU = torch.device("cpu")
Check = Callable[[World], None]


def outcomes(checks: Mapping[str, Check], world: int) -> dict[str, str]:
    """What went wrong in each check, on any of so many ranks; nothing where it passed."""
    return local.launch(functools.partial(_make, checks), world)


def _make(checks: Mapping[str, Check], place: World) -> dict[str, str]:
    config = Config(task="none", strategy="ddp").complete({}, place)
    with together(config, place, CPU):
        return {name: "".join(gathered(_failure(check, place))) for name, check in checks.items()}


def _failure(check: Check, place: World) -> str:
    try:
        check(place)
    except Exception:
        return f"rank {place.rank} of {place.size}: {traceback.format_exc()}"
    return ""


def gathered(value: Any) -> list[Any]:
    """What each rank has, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
