"""Indices -> a batch on the device, gathered by the batch wherever the data set can."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from evenstep import leash
from evenstep.order import hashing
from evenstep.order.digest import Digest
from evenstep.order.permutation import Indices, Permutation
from evenstep.order.plan import Share
from evenstep.tasks.task import Batch, Draw, Task
from evenstep.watch import stacks

TOGETHER = 1 << 22  # bytes of samples gathered at a time: small batches share a call, and stay in the cache


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
        self.by_rows = getattr(data, "by_rows", False)
        if hasattr(data, "gather"):
            self.gather = self._gather
        if hasattr(data, "__getitems__"):
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.chosen.block(index, index + 1)[0])]

    def _gather(self, indices: Indices) -> Batch:
        return self.data.gather(self.chosen.at(indices))

    def _several(self, indices: list[int]) -> Any:
        return self.data.__getitems__(self.chosen.at(np.array(indices)).tolist())


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
        self._loader: DataLoader[Any] | None = None
        self._readers: set[Any] = set()

    def steps(self, epoch: int) -> int:
        """Global steps in an epoch."""
        return self.order.steps(epoch)

    def epoch(self, epoch: int, step: int = 0) -> Iterator[Step]:
        """The steps of an epoch, from `step` on."""
        # batches are read ahead of us, so what belongs to a step waits here until its first batch arrives
        waiting: deque[tuple[Share, list[Part]]] = deque()

        def parts() -> Iterator[Part]:
            for share in self.order.shares(epoch, step, self.rank, self.world):
                cut = self._parts(share)
                waiting.append((share, cut))
                yield from cut

        arriving = self._gathered(parts()) if hasattr(self.data, "gather") else self._loaded(parts())
        for first in arriving:
            share, cut = waiting.popleft()
            micros = self._rest(first, arriving, cut, epoch)
            yield Step(micros, len(cut), share.total, share.digest)
            for _ in micros:  # what the step left unread still has to be taken
                pass

    def _gathered(self, parts: Iterator[Part]) -> Iterator[Batch]:
        """The parts' samples, gathered by the batch; of small ones that are rows, many with one call."""
        many = 1
        while group := list(islice(parts, many)):
            indices = [part.indices for part in group]
            batch = self.data.gather(indices[0] if len(group) == 1 else np.concatenate(indices))
            batch = on_device(batch, self.device, self.dtype)
            if len(group) == 1:
                yield batch
            else:
                yield from _taken_apart(batch, [len(part) for part in indices])
            if getattr(self.data, "by_rows", False):
                many = max(1, TOGETHER * len(group) // max(1, _bytes(batch)))

    def _loaded(self, parts: Iterator[Part]) -> Iterator[Batch]:
        """The same through a DataLoader, for data sets that are read sample by sample."""
        if self._loader is None:
            self._loader = _loader(self.data, self.workers, pin=self.device.type == "cuda")
        assert isinstance(self._loader.batch_sampler, _Sampler)
        self._loader.batch_sampler.next = (part.indices.tolist() for part in parts)
        before = set(multiprocessing.active_children())
        arriving = iter(self._loader)
        self._readers |= set(multiprocessing.active_children()) - before
        for batch in arriving:
            yield on_device(batch, self.device, self.dtype)

    def close(self) -> None:
        """End the loader's processes; one that is deep in a sample does not hold us up."""
        for process in self._readers:
            process.kill()
        self._loader = None

    def _rest(self, first: Batch, arriving: Iterator[Batch], parts: list[Part], epoch: int) -> Iterator[Micro]:
        yield self._ready(first, parts[0], epoch)
        for part in parts[1:]:
            yield self._ready(next(arriving), part, epoch)

    def _parts(self, share: Share) -> list[Part]:
        """A share cut into micro-batches: as many on every rank as the largest share needs."""
        count = 1 if self.micro_batch is None else -(-share.most // self.micro_batch)
        if count == 1 or not share.weighted:
            return [Part(share.indices, share.weighted > 0)] * count
        pieces = np.array_split(share.indices, count)
        # a rank with fewer samples than micro-batches keeps step on its first sample
        return [Part(piece, True) if len(piece) else Part(share.indices[:1], False) for piece in pieces]

    def _ready(self, batch: Batch, part: Part, epoch: int) -> Micro:
        """A batch that is on the device, prepared by the task."""
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
        multiprocessing_context=context,
        worker_init_fn=_start_worker if workers else None,
    )


def _start_worker(number: int) -> None:
    """A worker ends with its rank, leaves signals to it, and says where it is when asked."""
    del number
    leash.hold()
    leash.leave_signals_to_parent()
    stacks.answer_when_asked()


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """A batch's tensors on the device, those of floating point in the training's dtype."""

    def moved(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.device == device and tensor.dtype == wanted:
            return tensor
        if device.type == "cuda":
            tensor = tensor.pin_memory()  # else the copy waits for the device, and we for the copy
        return tensor.to(device, wanted, non_blocking=True)

    return _each(batch, moved)


def _taken_apart(batch: Batch, lengths: list[int]) -> Iterator[Batch]:
    """The batches that were gathered together, so many rows each."""
    start = 0
    for length in lengths:
        yield _each(batch, partial(torch.narrow, dim=0, start=start, length=length))
        start += length


def _bytes(batch: Batch) -> int:
    sizes: list[int] = []
    _each(batch, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def _each(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """The batch with each of its tensors changed, whatever they lie in."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: _each(part, change) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_each(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
