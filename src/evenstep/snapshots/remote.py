"""Storage at an address: whatever fsspec knows, from S3 and its like to a folder on another disk."""

import contextlib
import uuid
from collections.abc import Iterator
from errno import EBUSY, ECONNREFUSED, ECONNRESET, EHOSTUNREACH, EIO, ENETUNREACH, EREMOTEIO, ETIMEDOUT
from itertools import chain
from pathlib import Path
from typing import Any, Self, final

from evenstep.errors import UserError
from evenstep.snapshots.storage import BLOCK, Blocks, Folder, Storage, why

FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}
"""Where folders are but a part of a name, and a file is there only once it is whole."""

S3 = ("s3", "s3a")


def storage_at(address: str) -> Storage:
    """The storage of an address, or of a folder's path."""
    protocol, separator, rest = address.partition("://")
    if not separator or protocol in ("file", "local"):
        folder = Path(rest if separator else address).expanduser()
        if not folder.is_dir():
            raise UserError(f"{address}: there is no such folder; make it, or name another")
        return Folder(folder)
    if not rest.strip("/"):
        raise UserError(f"{address} names no place; it is {protocol}://bucket/prefix, say")
    import fsspec

    try:
        options = _s3_options() if protocol in S3 else {}
        filesystem, path = fsspec.core.url_to_fs(
            address, skip_instance_cache=True, use_listings_cache=False, **options
        )
    except ImportError as error:
        extra = " (pip install 'evenstep[s3]')" if protocol in S3 else ""
        raise UserError(f"{address}: {error}{extra}") from None
    except ValueError:
        raise UserError(
            f"{address}: no storage is known by {protocol}://; take s3://bucket/prefix, another address "
            "that fsspec knows, or a folder"
        ) from None
    if protocol in S3:
        filesystem.retries = 1  # botocore tries again by itself
    return Remote(filesystem, path.rstrip("/"), protocol)


def _s3_options() -> dict[str, Any]:
    from evenstep.snapshots import s3

    return s3.options()


PASSING = {None, EBUSY, EREMOTEIO, EIO, ETIMEDOUT, ECONNREFUSED, ECONNRESET, ENETUNREACH, EHOSTUNREACH}
"""Of a network, and of a store that is busy: `None` is what libraries have no number for."""


class Unreachable(UserError):
    """It may yet come to work by itself."""


def make_sure(storage: Storage) -> None:
    """That files can be kept there, found, read and taken away; a UserError says what to do about it."""
    name, content = f".evenstep-{uuid.uuid4().hex}", b"Written to see whether it can be. It can go.\n"
    try:
        storage.write(name, [content])
        found = storage.content(name, len(content))
        storage.remove(name)
    except OSError as error:
        raise _advice(storage.address, error) from None
    if found != content:
        raise UserError(f"{storage.address}: what was written there came back changed")


def _advice(address: str, error: OSError) -> UserError:
    found = f"{address}: {why(error)}"
    if isinstance(error, PermissionError) or "credentials" in found.lower():
        return UserError(
            f"{found}; are the credentials right (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE), and may they read and write there?"
        )
    if isinstance(error, FileNotFoundError):
        return UserError(f"{found}; make the bucket or the folder first, or name another")
    kind = Unreachable if error.errno in PASSING else UserError
    return kind(
        f"{found}; is the address right, and the endpoint (AWS_ENDPOINT_URL, for what is like S3 but not "
        "Amazon's), and can it be reached from here?"
    )


@final
class Remote(Storage):
    """Files under an fsspec address."""

    def __init__(self, filesystem: Any, prefix: str, protocol: str) -> None:
        self.filesystem = filesystem
        self.prefix = prefix
        self.protocol = protocol
        self.address = f"{protocol}://{prefix.lstrip('/')}"

    def files(self) -> dict[str, int]:
        with _as_os_errors():
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.find(self.prefix, detail=True)
            except FileNotFoundError:
                return {}
        start = f"{self.prefix}/"  # some stores tell of the folder itself too
        return {
            path.removeprefix(start): int(facts["size"])
            for path, facts in found.items()
            if path.startswith(start) and facts["type"] == "file"
        }

    def read(self, path: str) -> Iterator[memoryview]:
        with _as_os_errors():
            source = self.filesystem.open(self._place(path), "rb", block_size=BLOCK, cache_type="none")
        with source:
            while True:
                with _as_os_errors():
                    block = source.read(BLOCK)
                if not block:
                    return
                yield memoryview(block)

    def write(self, path: str, blocks: Blocks) -> None:
        place = self._place(path)
        if self.protocol in FLAT:
            self._write_whole(place, iter(blocks))
        else:
            self._write_aside(place, blocks)

    def _write_whole(self, place: str, blocks: Iterator[bytes | memoryview]) -> None:
        """Where a file is there once it is whole: in one request, or in parts that become a file in the end."""
        first = next(blocks, b"")
        second = next(blocks, None)
        if second is None:
            with _as_os_errors():
                self.filesystem.pipe_file(place, bytes(first))
            return
        with _as_os_errors():
            target = self.filesystem.open(place, "wb", block_size=BLOCK, autocommit=False)
        try:
            for block in chain((first, second), blocks):
                with _as_os_errors():
                    target.write(block)
            with _as_os_errors():
                target.close()
                target.commit()
        except BaseException:  # to close it, as `with` would, would make a file of what is there
            target.closed = True  # nor may collecting the garbage close it
            with contextlib.suppress(Exception):
                target.discard()
            raise

    def _write_aside(self, place: str, blocks: Blocks) -> None:
        """Where a file grows under everyone's eyes: under another name first."""
        folder, _, name = place.rpartition("/")
        aside = f"{folder}/.{name}.{uuid.uuid4().hex}"
        with _as_os_errors():
            self.filesystem.makedirs(folder, exist_ok=True)
        try:
            with self.filesystem.open(aside, "wb") as target:
                for block in blocks:
                    target.write(block)
            with _as_os_errors():
                self.filesystem.mv(aside, place)
        except BaseException:
            with contextlib.suppress(Exception):
                self.filesystem.rm_file(aside)
            raise

    def remove(self, path: str) -> None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._place(path))

    def within(self, folder: str) -> Self:
        return type(self)(self.filesystem, self._place(folder), self.protocol)

    def _place(self, path: str) -> str:
        return f"{self.prefix}/{path}"


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """What a file system's library raises, in the one kind that callers expect."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
