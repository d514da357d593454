"""This process among the others: its device, and the group of ranks for as long as they train together."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from evenstep import world
from evenstep.config import Settled
from evenstep.errors import UserError
from evenstep.watch.board import Board, Private, Shared
from evenstep.world import World

T = TypeVar("T")

PATIENCE_WITH_PEERS = timedelta(minutes=10)  # the others may be reading data for the first time


def choose_device(wanted: str, place: World) -> torch.device:
    """Where this rank computes; `auto` is the fastest there is."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if place.size == 1 and torch.backends.mps.is_available():
            wanted = "mps"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device cuda: torch finds no CUDA device here; take --device cpu")
        found = torch.cuda.device_count()
        if place.local_size > found:
            raise UserError(
                f"{place.local_size} processes need a GPU each, and {place.host} has {found}; "
                f"take --procs {found}, or --device cpu"
            )
        return torch.device("cuda", place.local_rank)
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("device mps: torch finds none here; take --device cpu")
        if place.size > 1:
            raise UserError("device mps has no collectives; take --procs 1, or --device cpu")
    return torch.device(wanted)


@contextlib.contextmanager
def together(config: Settled, place: World, device: torch.device) -> Iterator[None]:
    """Among the other ranks, for as long as it takes."""
    if place.local_size > 1:
        torch.set_num_threads(world.threads_wanted() or max(1, world.cores() // place.local_size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.strategy not in ("ddp", "fsdp"):
        yield
        return
    # objects travel by gloo also where gradients travel by NCCL
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=place.rank, world_size=place.size, store=_store(place), timeout=PATIENCE_WITH_PEERS
    )
    group = dist.group.WORLD
    try:
        yield
    except BaseException:
        if place.size == 1:
            dist.destroy_process_group()
        raise  # with others in the group, to take leave would be to wait for them
    # Whoever lets go of gloo's group last waits for its threads, and they may want the interpreter to drop a
    # tensor: DDP waits without giving it up, and hangs for good. So DDP goes first, and the group itself last.
    gc.collect()
    dist.destroy_process_group()
    del group


def _store(place: World) -> Store:
    """Where the ranks of this attempt find each other, and nothing of an earlier one."""
    if place.size == 1:
        return HashStore()  # there is nobody to meet and no port to open
    store, _, _ = next(rendezvous("env://", timeout=PATIENCE_WITH_PEERS))
    return PrefixStore(world.attempt(), store)


def agreed(choose: Callable[[], T], place: World) -> T:
    """What rank 0 chooses, on every rank."""
    chosen: list[Any] = [choose() if place.leads else None]
    if place.size > 1:
        dist.broadcast_object_list(chosen, src=0)
    found: T = chosen[0]
    return found


def known(value: T | None, place: World) -> T | None:
    """What the first rank that knows it knows, on every rank."""
    return next((each for each in gathered(value, place) if each is not None), None)


def gathered(value: T, place: World) -> list[T]:
    """What each rank has, in rank order, on every rank."""
    values: list[Any] = [value]
    if place.size > 1:
        values *= place.size
        dist.all_gather_object(values, value)
    return values


def board(place: World) -> Board:
    """Where the ranks leave notes for each other."""
    if place.size == 1:
        return Private()
    return Shared(*world.store(), world.attempt())
