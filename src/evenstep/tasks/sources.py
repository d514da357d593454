"""Where the real data sets come from, whether they are here, and how they get here.

A data set becomes visible in one rename, after its checksums: what is there is whole. What breaks off goes
on where it stopped.
"""

import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from evenstep.errors import UserError, unknown

Report = Callable[[int, int | None], None]  # bytes so far, and in all where the server says

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set as its publisher ships it."""

    address: str
    place: str
    """What it is below the folder of data sets: a file, or the folder that its archive holds."""
    files: Mapping[str, str]
    """The files that make it up, from the folder of data sets on, each with its md5."""
    archive_md5: str | None = None
    """For those who publish one."""
    size: int
    """Bytes to download, roughly."""
    terms: str

    @property
    def download(self) -> str:
        """The name of the file that is downloaded."""
        return self.address.rpartition("/")[2]


SOURCES: Mapping[str, Source] = {
    "cifar10": Source(
        address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        place="cifar-10-batches-py",
        files={
            "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
            "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
            "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
        },
        size=170_498_071,
        terms="none stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    ),
    "fraud": Source(
        address="https://storage.googleapis.com/download.tensorflow.org/data/creditcard.csv",
        place="creditcard.csv",
        files={"creditcard.csv": "e90efcb83d69faf99fcab8b0255024de"},
        size=150_828_752,
        terms="ODbL 1.0 / DbCL 1.0; Machine Learning Group, ULB",
    ),
    "movielens": Source(
        address="https://files.grouplens.org/datasets/movielens/ml-latest-small.zip",
        place="ml-latest-small",
        files={
            "ml-latest-small/ratings.csv": "325a6f09399d1c45671f187505e1a100",
            "ml-latest-small/movies.csv": "ed94fab72b62442ef8150d9446e000d6",
        },
        size=978_202,
        terms="research only, not commercial; cite F. M. Harper and J. Konstan, The MovieLens Datasets, 2015",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A data set, and whether it is here."""

    name: str
    source: Source
    path: Path
    here: bool


def listing(home: Path, sources: Mapping[str, Source] = SOURCES) -> list[Listed]:
    """The data sets, and which of them are in the folder `home`."""
    return [
        Listed(name=name, source=source, path=home / source.place, here=_all_there(source, home))
        for name, source in sources.items()
    ]


def need(name: str, home: Path) -> Path:
    """Where a data set is, for those who cannot go on without it."""
    source = _source(name, SOURCES)
    if not _all_there(source, home):
        raise UserError(
            f"{name} needs {(home / source.place).absolute()}, which is not there or not whole: "
            f"run `evenstep data get {name}`, or set EVENSTEP_DATA to the folder that holds {source.place}"
        )
    return home / source.place


def _unseen(done: int, total: int | None) -> None:
    """A report that nobody reads."""
    del done, total


def get(name: str, home: Path, report: Report = _unseen, sources: Mapping[str, Source] = SOURCES) -> Path:
    """Fetch a data set from its publisher, unless it is here; returns where it is.

    A file that the user has put into `home` is taken in place of the download.
    """
    source = _source(name, sources)
    place = home / source.place
    if place.exists():
        _check_files(source, home, f"move {place.absolute()} out of the way and run this again")
        return place
    try:
        home.mkdir(parents=True, exist_ok=True)
        archive = home / source.download
        if archive.exists():
            _unpack(source, archive, home)
        else:
            part = archive.with_name(f"{archive.name}.part")
            with _alone(part) as file:
                _download(source, file, home, report)
                _unpack_or_drop(source, part, home)
    except OSError as error:
        raise UserError(f"{source.place} cannot be kept in {home}: {error.strerror or error}") from None
    return place


def _source(name: str, sources: Mapping[str, Source]) -> Source:
    if name not in sources:
        raise unknown("data set", name, sources)
    return sources[name]


def _all_there(source: Source, home: Path) -> bool:
    return all((home / name).is_file() for name in source.files)


# The download


@contextmanager
def _alone(part: Path) -> Iterator[IO[bytes]]:
    """The half-downloaded file, while no other process writes it."""
    with part.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is downloading {part.name}; wait for it to end") from None
        try:
            yield file
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()


def _download(source: Source, file: IO[bytes], home: Path, report: Report) -> None:
    """Fetch what is missing of the file; where the connection breaks, go on as long as more arrives."""
    while True:
        before = file.tell()
        try:
            total = _fetch(source.address, file, report)
            if total is None or file.tell() >= total:
                return
            problem = "the connection broke off"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        if file.tell() <= before:
            raise UserError(
                f"{source.address} cannot be fetched ({problem}); try again, or fetch it elsewhere and put it at "
                f"{(home / source.download).absolute()}, then run this again"
            )


def _fetch(address: str, file: IO[bytes], report: Report) -> int | None:
    """Append to the file from where it ends; returns how long it should be, where the server says."""
    start = file.tell()
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return start  # nothing follows: the checksum tells whether that is all
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            file.seek(0)
            file.truncate()  # the server does not continue files: from the beginning
            start = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        report(start, total)
        while chunk := response.read(CHUNK):
            file.write(chunk)
            report(file.tell(), total)
    file.flush()
    return total


def _unpack_or_drop(source: Source, part: Path, home: Path) -> None:
    """Throw away what is not the published file: a later try would only continue it."""
    try:
        _unpack(source, part, home)
    except UserError:
        part.unlink()
        raise


# Checksums


def _check_archive(source: Source, path: Path) -> None:
    expected = source.archive_md5 or source.files.get(source.download)
    if expected is not None and (found := _md5(path)) != expected:
        raise UserError(
            f"{path.name} is not the file that was published at {source.address}: "
            f"its md5 is {found}, not {expected}; nothing was unpacked, try again"
        )


def _check_files(source: Source, home: Path, remedy: str) -> None:
    for name, expected in source.files.items():
        path = home / name
        if not path.is_file():
            raise UserError(f"{name} is missing from {source.place}: {remedy}")
        if (found := _md5(path)) != expected:
            raise UserError(f"{name} is not the published file: its md5 is {found}, not {expected}: {remedy}")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# From the archive to the folder


def _unpack(source: Source, archive: Path, home: Path) -> None:
    """Make the data set visible, all of it at once; the download is not needed any more."""
    _check_archive(source, archive)
    if source.place == source.download:
        _on_disk(archive)
        archive.rename(home / source.place)
        return
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=home) as folder:
        try:
            for name, content in _members(source, archive):
                _write(Path(folder, name), content)
        except UNREADABLE as error:
            raise UserError(f"{archive.name} cannot be unpacked ({error}); is it whole?") from None
        _check_files(source, Path(folder), f"{source.address} holds something else now")
        Path(folder, source.place).rename(home / source.place)
    archive.unlink()


def _members(source: Source, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files in an archive, by name; none that would lie, or point, outside the data set's folder."""
    if source.download.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir():
                    with opened.open(info) as content:
                        yield _safe(info.filename, source), content
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isdir():
                    yield _safe(member.name, source), _content(tar, member, source)


def _safe(name: str, source: Source) -> str:
    parts = PurePosixPath(name).parts
    if len(parts) < 2 or parts[0] != source.place or ".." in parts or "\\" in name or "\0" in name:
        raise UserError(f"{source.download} holds {name!r}, which lies outside {source.place}: not unpacked")
    return name


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, source: Source) -> IO[bytes]:
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise UserError(f"{source.download} holds {member.name!r}, which is no plain file: not unpacked")
    return content


def _write(path: Path, content: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file, CHUNK)
    _on_disk(path)


def _on_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
