"""What a snapshot holds, as JSON: its place in the training, its files with checksums, its tensors.

Reading one runs nothing: what is not a plain value of the expected kind is refused.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

FORMAT = 1
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class Damaged(Exception):
    """A snapshot that cannot be trusted, and why."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a tensor, and where it lies."""

    tensor: str
    dtype: str
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int

    @property
    def length(self) -> int:
        """In bytes."""
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a snapshot."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a snapshot but its tensors' values."""

    cursor: Mapping[str, Any]
    """Where in the training this is."""
    values: Mapping[str, Any]
    """What else the optimizer and the scaler hold, by name."""
    generators: list[Mapping[str, Any]]
    """The random state of each rank."""
    files: list[File]
    chunks: list[Chunk]
    world: int

    def pack(self) -> bytes:
        """As a file."""
        body = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, allow_nan=True)
        return json.dumps({"sha256": sha256([body.encode()]), "body": body}).encode()

    def metadata(self) -> Metadata:
        """As torch.distributed.checkpoint wants to know it."""
        tensors: dict[str, Any] = {}
        for chunk in self.chunks:
            known = tensors.setdefault(
                chunk.tensor,
                TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[chunk.dtype]), torch.Size(chunk.whole), chunks=[]
                ),
            )
            known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        return Metadata(state_dict_metadata=tensors)


def unpack(content: bytes) -> Manifest:
    """From a file; anything but what `pack` writes is damaged."""
    try:
        outer = json.loads(content)
        body = outer["body"]
        if sha256([body.encode()]) != outer["sha256"]:
            raise Damaged("its manifest does not match its own checksum")
        fields = json.loads(body)
        if fields.pop("format") != FORMAT:
            raise Damaged("its manifest is of a format this evenstep does not read")
        fields["files"] = [File(**file) for file in fields["files"]]
        fields["chunks"] = [Chunk(**{**chunk, **_tuples(chunk)}) for chunk in fields["chunks"]]
        manifest = Manifest(**fields)
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"its manifest is not one: {type(error).__name__}") from None
    _check(manifest)
    return manifest


def _tuples(chunk: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(chunk[name]) for name in ("whole", "offsets", "sizes")}


def _check(manifest: Manifest) -> None:
    """A stranger's manifest must not lead out of the snapshot, nor out of its files."""
    sizes = {file.name: file.size for file in manifest.files}
    for name in sizes:
        if "/" in name or "\\" in name or name.startswith("."):
            raise Damaged(f"its manifest names a file {name!r}")
    for chunk in manifest.chunks:
        inside = chunk.file in sizes and 0 <= chunk.start <= sizes[chunk.file] - chunk.length
        if chunk.dtype not in DTYPES or not inside or min((*chunk.offsets, *chunk.sizes, 0)) < 0:
            raise Damaged(f"its manifest misplaces {chunk.tensor}")


def sha256(blocks: Iterable[bytes | memoryview]) -> str:
    """The checksum of these blocks, one behind the other."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
