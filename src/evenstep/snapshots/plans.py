"""Who writes which part of which tensor where, and who reads it: torch.distributed.checkpoint's planning.

Its planners decide which rank writes what (each part once, evenly dealt out) and which parts a rank of another
strategy or world needs. Its file formats are left aside: they pickle. Here a rank's parts, whole rows of tensors,
lie one behind the other in a single file, and the manifest says where.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from evenstep.snapshots.manifest import DTYPES, Manifest, Part, Stored

ALIGNED = 64  # bytes: where a tensor may begin in a file
AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}  # it is flat


class Placed(NamedTuple):
    """A part of a tensor, as its rank tells rank 0 of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part


@dataclass(frozen=True)
class Target:
    """Where in its buffer a rank puts a part of a tensor."""

    item: WriteItem
    place: Tensor


class Writing:
    """A rank's part in the writing of a state. The plan is agreed once; it holds while the shapes do."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, world: int) -> None:
        self.shapes = shapes(tensors)
        self._planner = DefaultSavePlanner(**AS_IT_IS)
        self._leads = rank == 0
        self._planner.set_up_planner(dict(tensors), is_coordinator=self._leads)
        agreed = self._planner.finish_plan(_agreed(self._planner, rank, world))
        items = [item for item in agreed.items if _length(item)]
        starts = [0]
        for item in items:
            starts.append(-(-(starts[-1] + _length(item)) // ALIGNED) * ALIGNED)
        self.buffer = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        """What the file will hold."""
        self._targets = [Target(item, self._view(item, start)) for item, start in zip(items, starts, strict=False)]
        placed = [_placed(item, rank, start) for item, start in zip(items, starts, strict=False)]
        self.tensors = _stored(tensors, _gathered(placed, rank, world))
        """On rank 0, those of all ranks."""

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts, as they are now, into the buffer: the only thing training waits for."""
        self._planner.set_up_planner(dict(tensors), is_coordinator=self._leads)
        on_gpu = False
        for target in self._targets:
            part = self._planner.resolve_data(target.item)
            assert isinstance(part, Tensor)
            on_gpu |= part.is_cuda
            target.place.copy_(part, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    @property
    def content(self) -> memoryview:
        """The buffer, as files take it."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]

    def _view(self, item: WriteItem, start: int) -> Tensor:
        assert item.tensor_data is not None
        there = self.buffer[start : start + _length(item)]
        return there.view(item.tensor_data.properties.dtype).view(item.tensor_data.chunk.sizes)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a plan depends on."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def read(tensors: dict[str, Any], folder: Path, manifest: Manifest, world: int) -> None:
    """Fill these tensors, sharded as they may be, from the files of a snapshot; every rank has to ask."""
    with warnings.catch_warnings():  # a single process is what it says it assumes
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_distributed(
            tensors,
            storage_reader=Reader(folder, manifest),
            planner=DefaultLoadPlanner(**AS_IT_IS),
            no_dist=world == 1,
        )


def _agreed(planner: DefaultSavePlanner, rank: int, world: int) -> SavePlan:
    """This rank's share of the plan that all make together."""
    local = planner.create_local_plan()
    if world == 1:
        return planner.create_global_plan([local])[0][0]
    plans: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(local, plans, dst=0)
    if plans is not None:
        plans = list(planner.create_global_plan(plans)[0])
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans, src=0)
    plan: SavePlan = mine[0]
    return plan


def _gathered(placed: list[Placed], rank: int, world: int) -> list[Placed]:
    """On rank 0, what all ranks have placed."""
    if world == 1:
        return placed
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(placed, every, dst=0)
    return [part for of_one in every or [] for part in of_one]


def _stored(tensors: Mapping[str, Tensor], placed: list[Placed]) -> dict[str, Stored]:
    """By name, with the parts in the order of their rows; an empty tensor has none."""
    found = {
        name: Stored(_dtype(tensor.dtype), tuple(tensor.shape), [])
        for name, tensor in tensors.items()
        if not tensor.numel()
    }
    for name, dtype, shape, part in sorted(placed, key=lambda one: one.part.row):
        found.setdefault(name, Stored(dtype, shape, [])).parts.append(part)
    return found


def _placed(item: WriteItem, rank: int, start: int) -> Placed:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    assert sizes[1:] == tuple(data.size[1:]), f"{item.index.fqn} is dealt out, and not by rows"
    part = Part(rank, start, *(offsets[:1] or (0,)), *(sizes[:1] or (1,)))
    return Placed(item.index.fqn, _dtype(data.properties.dtype), tuple(data.size), part)


def _length(item: WriteItem) -> int:
    """In bytes."""
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Reader(StorageReader):
    """Gives torch.distributed.checkpoint the parts it asks for, out of files that are read, not unpickled."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.parts = {(name, part.row): part for name, tensor in manifest.tensors.items() for part in tensor.parts}

    def reset(self, checkpoint_id: Any = None) -> None:
        del checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        return self.manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._rows(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _rows(self, item: ReadItem) -> Tensor:
        """The rows that are asked for, and no others: what one rank wrote, many may want a part of each."""
        name, offset = item.storage_index.fqn, item.storage_index.offset
        assert offset is not None
        tensor = self.manifest.tensors[name]
        part = self.parts[name, offset[0] if offset else 0]
        first, rows = (item.storage_offsets[0], item.lengths[0]) if offset else (0, 1)
        content = np.fromfile(
            self.folder / self.manifest.files[part.file].name,
            dtype=np.uint8,
            count=rows * tensor.row_bytes,
            offset=part.start + first * tensor.row_bytes,
        )
        found = torch.from_numpy(content).view(DTYPES[tensor.dtype])
        return found.view(rows, *tensor.shape[1:]) if offset else found.view(())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True
