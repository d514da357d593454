"""Indices -> a batch on the device, gathered by the batch wherever the data set can."""

import multiprocessing
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from evenstep import leash
from evenstep.order import hashing
from evenstep.order.digest import Digest
from evenstep.order.permutation import Indices, Permutation
from evenstep.order.plan import Share
from evenstep.tasks.task import Batch, Draw, Task


class Order(Protocol):
    """What deals out the samples of each global step: a Plan, or something that stands in for one."""

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch."""
        ...

    def shares(self, epoch: int, step: int, rank: int, world: int) -> Iterator[Share]:
        """What a rank computes in each step, from `step` on."""
        ...


class Part(NamedTuple):
    """The samples of a batch small enough to compute at once."""

    indices: Indices
    counts: bool  # else it is there to keep step only


class Micro(NamedTuple):
    """A batch small enough to compute at once."""

    batch: Batch
    indices: Indices
    counts: bool  # else it is there to keep step only


class Step(NamedTuple):
    """What one rank computes in one global step."""

    micros: Iterator[Micro]
    pieces: int  # micro-batches, the same number on every rank
    total: int  # samples in the global step, over all ranks
    digest: Digest  # of this rank's samples


class Subset:
    """So many samples of a data set, chosen by a key, without a list of them."""

    def __init__(self, data: Any, size: int, seed: int) -> None:
        self.data = data
        self.size = min(size, len(data))
        self.chosen = Permutation(len(data), hashing.key("sample", seed))
        if hasattr(data, "gather"):
            self.gather = self._gather

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.chosen.block(index, index + 1)[0])]

    def _gather(self, indices: Indices) -> Batch:
        return self.data.gather(self.chosen.at(indices))


class Batches:
    """One rank's batches of a data set, in an order, on a device."""

    def __init__(
        self,
        data: Any,
        task: Task,
        order: Order,
        *,
        rank: int,
        world: int,
        device: torch.device,
        micro_batch: int | None = None,
        augment_seed: int | None = None,
        workers: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.data = data
        self.task = task
        self.order = order
        self.rank = rank
        self.world = world
        self.device = device
        self.micro_batch = micro_batch
        self.augment_seed = augment_seed
        self.workers = workers
        self.dtype = dtype
        self.gathers = hasattr(data, "gather")
        self._loader: DataLoader[Any] | None = None

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch."""
        return self.order.steps(epoch)

    def epoch(self, epoch: int, step: int = 0) -> Iterator[Step]:
        """The steps of an epoch, from `step` on."""
        shares = self.order.shares(epoch, step, self.rank, self.world)
        if self.gathers:
            for share in shares:
                parts = self._parts(share)
                micros = (self._ready(self.data.gather(part.indices), part, epoch) for part in parts)
                yield Step(micros, len(parts), share.total, share.digest)
        else:
            yield from self._loaded(shares, epoch)

    def _loaded(self, shares: Iterator[Share], epoch: int) -> Iterator[Step]:
        """The same through a DataLoader, for data sets that are read sample by sample."""
        if self._loader is None:
            self._loader = _loader(self.data, self.workers, pin=self.device.type == "cuda")
        # the loader draws ahead of us, so what belongs to a batch waits here until the batch arrives
        waiting: list[tuple[Share, list[Part]]] = []

        def drawn() -> Iterator[list[int]]:
            for share in shares:
                parts = self._parts(share)
                waiting.append((share, parts))
                for part in parts:
                    yield part.indices.tolist()

        assert isinstance(self._loader.batch_sampler, _Sampler)
        self._loader.batch_sampler.next = drawn()
        arrived = iter(self._loader)
        for batch in arrived:
            share, parts = waiting.pop(0)
            micros = self._rest(batch, arrived, parts, epoch)
            yield Step(micros, len(parts), share.total, share.digest)
            for _ in micros:  # what the step left unread still has to be taken off the loader
                pass

    def _rest(self, first: Batch, arrived: Iterator[Batch], parts: list[Part], epoch: int) -> Iterator[Micro]:
        yield self._ready(first, parts[0], epoch)
        for part in parts[1:]:
            yield self._ready(next(arrived), part, epoch)

    def _parts(self, share: Share) -> list[Part]:
        """A share cut into micro-batches: as many on every rank as the largest share needs."""
        count = 1 if self.micro_batch is None else -(-share.most // self.micro_batch)
        if count == 1 or not share.weighted:
            return [Part(share.indices, share.weighted > 0)] * count
        pieces = np.array_split(share.indices, count)
        # a rank with fewer samples than micro-batches keeps step on its first sample
        return [Part(piece, True) if len(piece) else Part(share.indices[:1], False) for piece in pieces]

    def _ready(self, batch: Batch, part: Part, epoch: int) -> Micro:
        """A batch on the device, prepared by the task."""
        batch = on_device(batch, self.device, self.dtype)
        draw = None
        if self.augment_seed is not None:
            draw = Draw(self.augment_seed, epoch, part.indices, self.device)
        return Micro(self.task.prepare(batch, draw), part.indices, part.counts)


class _Sampler:
    """Hands a DataLoader the lists of indices of the current epoch."""

    next: Iterator[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        return self.next


def _loader(data: Any, workers: int, pin: bool) -> DataLoader[Any]:
    # fork in a process that runs collectives can deadlock; a forkserver cannot
    context = "forkserver" if workers else None
    if workers:
        multiprocessing.set_forkserver_preload(["torch", "evenstep.batches"])
    return DataLoader(
        data,
        batch_sampler=_Sampler(),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin,
        generator=torch.Generator(),  # or it would draw from everyone's, once an epoch, and once when resumed
        multiprocessing_context=context,
        worker_init_fn=_start_worker if workers else None,
    )


def _start_worker(number: int) -> None:
    """A worker ends with its rank, and leaves signals to it."""
    del number
    leash.hold()
    leash.leave_signals_to_parent()


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """A batch's tensors on the device, those of floating point in the training's dtype."""
    if isinstance(batch, torch.Tensor):
        wanted = dtype if batch.is_floating_point() else batch.dtype
        if batch.device == device and batch.dtype == wanted:
            return batch
        if device.type == "cuda":
            batch = batch.pin_memory()  # else the copy waits for the device, and we for the copy
        return batch.to(device, wanted, non_blocking=True)
    if isinstance(batch, dict):
        return {name: on_device(part, device, dtype) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [on_device(part, device, dtype) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
