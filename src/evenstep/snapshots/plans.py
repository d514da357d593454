"""Who writes which part of which tensor where, and who reads it: torch.distributed.checkpoint's planning.

Its planners decide which rank writes what (each part once, evenly dealt out) and which parts a rank of another
strategy or world needs. Its file formats are left aside: they pickle. Here a rank's parts lie one behind the
other in a single file, and the manifest says where.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from evenstep.snapshots.manifest import DTYPES, Chunk, Manifest

ALIGNED = 64  # bytes: where a tensor may begin in a file


@dataclass(frozen=True)
class Place:
    """Where in its file a rank writes a part of a tensor."""

    item: WriteItem
    chunk: Chunk


class Writing:
    """A rank's part in the writing of a state. The plan is agreed once; it holds while the shapes do."""

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, world: int) -> None:
        self.shapes = shapes(tensors)
        self._planner = DefaultSavePlanner()
        self._leads = rank == 0
        self._planner.set_up_planner(dict(tensors), is_coordinator=self._leads)
        agreed = self._planner.finish_plan(_agreed(self._planner, rank, world))
        self.places: list[Place] = []
        self.length = 0
        for item in agreed.items:
            chunk = _chunk(item, f"rank-{rank}.bin", self.length)
            self.places.append(Place(item, chunk))
            self.length = -(-(self.length + chunk.length) // ALIGNED) * ALIGNED
        self.chunks = _gathered([place.chunk for place in self.places], rank, world)
        """On rank 0, those of all ranks."""
        self.buffer = torch.empty(self.length, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts, as they are now, into the buffer: the only thing training waits for."""
        self._planner.set_up_planner(dict(tensors), is_coordinator=self._leads)
        on_gpu = False
        for place in self.places:
            part, chunk = self._planner.resolve_data(place.item), place.chunk
            assert isinstance(part, Tensor)
            on_gpu |= part.is_cuda
            target = self.buffer[chunk.start : chunk.start + chunk.length].view(part.dtype).view(part.shape)
            target.copy_(part, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

    @property
    def content(self) -> memoryview:
        """What the file will hold."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a plan depends on."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def read(tensors: dict[str, Any], folder: Path, manifest: Manifest, world: int) -> None:
    """Fill these tensors, sharded as they may be, from the files of a snapshot; every rank has to ask."""
    with warnings.catch_warnings():  # a single process is what it says it assumes
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_distributed(tensors, storage_reader=Reader(folder, manifest), no_dist=world == 1)


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


def _gathered(chunks: list[Chunk], rank: int, world: int) -> list[Chunk]:
    if world == 1:
        return chunks
    every: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(chunks, every, dst=0)
    return [chunk for part in every or [] for chunk in part]


def _chunk(item: WriteItem, file: str, start: int) -> Chunk:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    return Chunk(
        tensor=item.index.fqn,
        dtype=str(data.properties.dtype).removeprefix("torch."),
        whole=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        file=file,
        start=start,
    )


class Reader(StorageReader):
    """Gives torch.distributed.checkpoint the parts it asks for, out of files that are mapped, not unpickled."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.chunks = {(chunk.tensor, chunk.offsets): chunk for chunk in manifest.chunks}

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
            found = self._part(item.storage_index)
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                found = found.narrow(axis, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        chunk = self.chunks[index.fqn, tuple(index.offset)]
        count = math.prod(chunk.sizes)
        if not count:
            return torch.empty(chunk.sizes, dtype=DTYPES[chunk.dtype])
        content = np.fromfile(self.folder / chunk.file, dtype=np.uint8, count=chunk.length, offset=chunk.start)
        return torch.from_numpy(content).view(DTYPES[chunk.dtype]).view(chunk.sizes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True
