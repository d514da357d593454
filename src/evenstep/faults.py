"""What goes wrong in a step, named: by epoch, step, rank, and the samples that the rank computed it on."""

import os
import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from evenstep.batches import Batches
from evenstep.errors import UserError
from evenstep.tasks import samples
from evenstep.watch import words

NO_MEMORY = "can't allocate memory"  # of torch's allocator for CPUs, which has no error of its own
CURE = "mend the data or lower --lr, or leave such steps out with --on-nan skip"


class OutOfMemory(Exception):
    """A step took more memory than there is."""


class _Seen(NamedTuple):
    """What a rank knows of a step whose loss is not finite."""

    host: str
    pid: int
    own: bool
    """Its part of the loss is not finite."""
    odd: list[int]
    """Its samples that are not finite themselves."""


def computed_on(batches: Batches, epoch: int, step: int, rank: int) -> list[int]:
    """The samples of a rank in a step."""
    share = next(batches.order.shares(epoch, step, rank, batches.world))
    found: list[int] = share.indices[: share.weighted].tolist()
    return found


def in_step(error: Exception, batches: Batches, epoch: int, step: int) -> Exception:
    """The error; where memory has run out, one that says in which step it was."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and NO_MEMORY not in str(error):
        return error
    own = computed_on(batches, epoch, step, batches.rank)
    where = f"{words.step(epoch, step)}, on {words.samples(own)}" if own else words.step(epoch, step)
    return OutOfMemory(f"in {where}: {str(error) or 'no memory is left'}")


def loss_not_finite(batches: Batches, epoch: int, step: int, *, own: bool) -> UserError:
    """Who met it, and with what. Every rank has to ask, and says the same."""
    odd = [i for i in computed_on(batches, epoch, step, batches.rank) if own and not _finite(batches, i)]
    seen = _of_all(_Seen(socket.gethostname(), os.getpid(), own, odd), batches.world)
    met = [rank for rank, each in enumerate(seen) if each.own]
    if len(met) == batches.world > 1 and not any(each.odd for each in seen):
        where = "on all ranks: the step before has made the weights useless"
    else:
        where = "; ".join(f"on {_met(batches, epoch, step, rank, seen[rank])}" for rank in met)
    return UserError(f"the loss is not finite in {words.step(epoch, step)}, {where}; {CURE}")


def weights_not_finite(epoch: int, step: int) -> UserError:
    """The loss was finite, its gradients were not."""
    return UserError(f"the weights are not finite any more after {words.step(epoch, step - 1)}; {CURE}")


def _met(batches: Batches, epoch: int, step: int, rank: int, seen: _Seen) -> str:
    own = computed_on(batches, epoch, step, rank)
    which = f" in {words.samples(own)}" if own else ""
    hold = "holds" if len(seen.odd) == 1 else "hold"
    odd = f", of which {words.samples(seen.odd)} {hold} what is not finite" if seen.odd else ""
    return f"rank {rank} ({seen.host}, pid {seen.pid}){which}{odd}"


def _finite(batches: Batches, index: int) -> bool:
    return samples.finite(samples.one(batches.data, index))


def _of_all(own: _Seen, world: int) -> list[_Seen]:
    found: list[Any] = [own] * world
    if world > 1:
        dist.all_gather_object(found, own)
    return found
