"""What a snapshot holds, as JSON: its place in the training, its files with checksums, its tensors.

Reading one runs nothing, and believes nothing: what was damaged does not match the checksum it begins with, and
what somebody made up has to be of the right kinds, lie inside of the snapshot's own files, and fill each tensor.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

FORMAT = 2
MOST = 1 << 28  # bytes that a manifest may have: a million parts of tensors need a tenth of that
DIMENSIONS = 64  # that a tensor may have
FILE = re.compile(r"rank-\d{1,9}\.bin", flags=re.ASCII)
HEAD, MIDDLE, END = b'{"sha256": "', b'", "manifest": ', b"}\n"
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


class File(NamedTuple):
    """A file of a snapshot."""

    name: str
    size: int
    sha256: str


class Part(NamedTuple):
    """Some rows of a tensor, and where they lie."""

    file: int
    """Which of the snapshot's files."""
    start: int
    row: int
    rows: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a snapshot. One without dimensions counts as a single row."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]

    @property
    def row_bytes(self) -> int:
        """The length of a row."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of a snapshot but its tensors' values."""

    snapshot: str
    world: int
    """How many ranks have written it."""
    progress: Mapping[str, Any]
    """Where in the training this is, and what came of it so far."""
    run: Mapping[str, Any]
    """Whose training: its plan, its configuration, its code."""
    values: Mapping[str, Any]
    """What else the optimizer and the scaler hold."""
    files: list[File]
    tensors: Mapping[str, Stored]

    @property
    def size(self) -> int:
        """In bytes, of all files."""
        return sum(file.size for file in self.files)

    def pack(self) -> bytes:
        """As a file."""
        tensors = {name: (tensor.dtype, tensor.shape, tensor.parts) for name, tensor in self.tensors.items()}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _sealed(json.dumps({"format": FORMAT, **fields, "tensors": tensors}).encode())

    def metadata(self) -> Metadata:
        """As torch.distributed.checkpoint wants to know it."""
        return Metadata(state_dict_metadata={name: _metadata(tensor) for name, tensor in self.tensors.items()})


def _metadata(tensor: Stored) -> TensorStorageMetadata:
    """Rows become chunks that are whole in all dimensions but the first."""
    rest = len(tensor.shape) - 1
    chunks = [
        ChunkStorageMetadata(torch.Size([part.row, *[0] * rest]), torch.Size([part.rows, *tensor.shape[1:]]))
        if tensor.shape
        else ChunkStorageMetadata(torch.Size([]), torch.Size([]))
        for part in tensor.parts
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks=chunks
    )


def _sealed(body: bytes) -> bytes:
    """With its checksum in front; all of it is JSON still."""
    return b"".join((HEAD, sha256([body]).encode(), MIDDLE, body, END))


# Reading one, byte by byte as `pack` writes it


def unpack(content: bytes) -> Manifest:
    """From a file; anything but what `pack` writes is damaged."""
    body = content[len(HEAD) + 64 + len(MIDDLE) : -len(END)]
    if content != _sealed(body):
        raise Damaged("its manifest does not match its own checksum")
    try:
        return _manifest(json.loads(body))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"its manifest is not one that this evenstep reads: {error!r:.200}") from None


def _manifest(fields: Any) -> Manifest:
    if fields.pop("format") != FORMAT:
        raise ValueError("of another format")
    files = [File(_file_name(name), _whole(size), _text(sha)) for name, size, sha in fields.pop("files")]
    tensors = {name: _tensor(*parts) for name, parts in _mapping(fields.pop("tensors")).items()}
    manifest = Manifest(
        snapshot=_text(fields.pop("snapshot")),
        world=_whole(fields.pop("world"), least=1),
        progress=_mapping(fields.pop("progress")),
        run=_mapping(fields.pop("run")),
        values=_mapping(fields.pop("values")),
        files=files,
        tensors=tensors,
    )
    if fields:
        raise ValueError(f"it says more than is known: {', '.join(fields)}")
    _check_places(manifest)
    return manifest


def _tensor(dtype: Any, shape: Any, parts: Any) -> Stored:
    if dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r:.40}")
    if len(shape) > DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    return Stored(
        dtype, tuple(_whole(length) for length in shape), [Part(*map(_whole, _four(part))) for part in parts]
    )


def _check_places(manifest: Manifest) -> None:
    """Each tensor is whole, and its parts lie in the files, none of them upon another."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("it names a file twice")
    used: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        row = 0
        for part in tensor.parts:
            used[part.file].append((part.start, part.start + part.rows * tensor.row_bytes))
            if part.row != row or not part.rows:
                raise ValueError(f"it misplaces a part of {name}")
            row += part.rows
        if row != (tensor.rows if tensor.row_bytes else 0):
            raise ValueError(f"it has {row} rows of {name}'s {tensor.rows}")
    for file, places in zip(manifest.files, used, strict=True):
        end = 0
        for start, stop in sorted(places):
            if start < end:
                raise ValueError(f"it puts two tensors in one place of {file.name}")
            end = stop
        if end > file.size:
            raise ValueError(f"it puts a tensor beyond the end of {file.name}")


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} where a number should be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} where a text should be")
    return value


def _file_name(value: Any) -> str:
    name = _text(value)
    if not FILE.fullmatch(name):
        raise ValueError(f"a file named {name!r:.40}")
    return name


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{value!r:.40} where names should be")
    return value


def _four(part: Any) -> list[Any]:
    if type(part) is not list or len(part) != 4:
        raise ValueError(f"a part {part!r:.40}")
    return part


def sha256(blocks: Iterable[bytes | memoryview]) -> str:
    """The checksum of these blocks, one behind the other."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
