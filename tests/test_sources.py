"""Data sets come whole or not at all: over a real HTTP server, with real archives."""

import fcntl
import hashlib
import http.server
import io
import multiprocessing
import os
import signal
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from evenstep import world
from evenstep.errors import UserError
from evenstep.tasks import sources
from evenstep.tasks.sources import SOURCES, Source, get, listing, need

BIG = bytes(range(256)) * 8192  # 2 MiB: several chunks
FILES = {"set/a.csv": b"1,2\n" * 1000, "set/deep/b.csv": b"x" * 3000, "set/README.txt": b"terms"}


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes by path, and can be told to hang up early or to ignore Range."""

    daemon_threads = True

    def __init__(self, content: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = dict(content)
        self.hang_up_after: list[int] = []  # bytes that the next answers send, one entry each
        self.continues = True
        self.asked: list[str | None] = []  # the Range of each request

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.asked.append(wanted)
        content = self.server.content.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.continues else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        part = content[start:]
        if self.server.hang_up_after:
            part = part[: self.server.hang_up_after.pop(0)]
        self.wfile.write(part)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({}) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_of(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set/", b"")
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def archived(server: Server, name: str, content: bytes, archive_md5: str | None = None) -> dict[str, Source]:
    server.content[name] = content
    source = Source(
        address=server.address(name),
        archive_md5=archive_md5,
        place="set",
        files={path: md5(FILES[path]) for path in ("set/a.csv", "set/deep/b.csv")},
        size=len(content),
        terms="",
    )
    return {"it": source}


def single(server: Server, content: bytes = BIG, served: bytes | None = None) -> dict[str, Source]:
    server.content["big.csv"] = content if served is None else served
    source = Source(
        address=server.address("big.csv"),
        place="big.csv",
        files={"big.csv": md5(content)},
        size=len(content),
        terms="",
    )
    return {"it": source}


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()}


@pytest.mark.parametrize(("name", "pack"), [("set.tar.gz", tar_of), ("set.zip", zip_of)])
def test_an_archive_arrives_whole(server: Server, tmp_path: Path, name: str, pack: object) -> None:
    content = pack(FILES)  # type: ignore[operator]
    home = tmp_path / "not" / "there" / "yet"
    place = get("it", home, sources=archived(server, name, content, md5(content)))
    assert place == home / "set"
    assert {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*.*") if p.is_file()} == FILES
    assert names(home) == {"set"}, "something was left behind"


def test_a_file_arrives_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    place = get("it", tmp_path, lambda done, total: seen.append((done, total)), single(server))
    assert place.read_bytes() == BIG
    assert names(tmp_path) == {"big.csv"}
    assert seen[0] == (0, len(BIG)) and seen[-1] == (len(BIG), len(BIG))
    assert seen == sorted(seen), "progress went backwards"


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big.csv").write_bytes(BIG)
    get("it", tmp_path, sources=single(server))
    assert server.asked == []


def test_what_is_there_but_damaged_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big.csv").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"not the published file.*out of the way"):
        get("it", tmp_path, sources=single(server))
    assert (tmp_path / "big.csv").read_bytes() == b"mine"


def test_a_broken_connection_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.hang_up_after = [700_000, 500_000]
    assert get("it", tmp_path, sources=single(server)).read_bytes() == BIG
    assert server.asked == [None, "bytes=700000-", "bytes=1200000-"]


def _get_until_killed(home: Path, table: Mapping[str, Source], enough: int) -> None:
    def report(done: int, total: int | None) -> None:
        assert total == len(BIG)
        if done >= enough:
            os.kill(os.getpid(), signal.SIGKILL)

    get("it", home, report, table)


def test_a_killed_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    table = single(server)
    process = multiprocessing.get_context("spawn").Process(
        target=_get_until_killed, args=(tmp_path, table, len(BIG) // 2)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path) == {"big.csv.part"}, "half a file must not be visible"
    kept = (tmp_path / "big.csv.part").stat().st_size
    assert kept > 0
    assert get("it", tmp_path, sources=table).read_bytes() == BIG
    assert server.asked == [None, f"bytes={kept}-"]


def test_a_server_that_cannot_continue_starts_over(server: Server, tmp_path: Path) -> None:
    server.continues = False
    (tmp_path / "big.csv.part").write_bytes(b"something old")
    assert get("it", tmp_path, sources=single(server)).read_bytes() == BIG


def test_a_whole_part_is_taken_as_it_is(server: Server, tmp_path: Path) -> None:
    (tmp_path / "big.csv.part").write_bytes(BIG)
    assert get("it", tmp_path, sources=single(server)).read_bytes() == BIG


def test_a_wrong_file_is_refused_and_thrown_away(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the file that was published"):
        get("it", tmp_path, sources=single(server, served=BIG[:-1] + b"?"))
    assert names(tmp_path) == set(), "nothing may become visible, and a later try must not continue this"


def test_a_wrong_archive_is_not_even_opened(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the file that was published"):
        get("it", tmp_path, sources=archived(server, "set.tar.gz", tar_of(FILES), md5(b"another")))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("missing", ["set/a.csv", "set/deep/b.csv"])
def test_an_archive_with_other_content_is_refused(server: Server, tmp_path: Path, missing: str) -> None:
    changed = {**FILES, missing: b"else"}
    with pytest.raises(UserError, match="holds something else now"):
        get("it", tmp_path, sources=archived(server, "set.zip", zip_of(changed)))
    fewer = {name: content for name, content in FILES.items() if name != missing}
    with pytest.raises(UserError, match="is missing"):
        get("it", tmp_path, sources=archived(server, "set.zip", zip_of(fewer)))
    assert names(tmp_path) == set()


HOSTILE = ["../evil", "set/../../evil", "/tmp/evil", "evil", "other/evil", "set/..\\evil"]


@pytest.mark.parametrize("evil", HOSTILE)
@pytest.mark.parametrize(("name", "pack"), [("set.tar.gz", tar_of), ("set.zip", zip_of)])
def test_a_file_outside_is_refused(server: Server, tmp_path: Path, name: str, pack: object, evil: str) -> None:
    home = tmp_path / "home"
    content = pack({**FILES, evil: b"evil"})  # type: ignore[operator]
    with pytest.raises(UserError, match="outside set: not unpacked"):
        get("it", home, sources=archived(server, name, content))
    assert names(home) == set() and names(tmp_path) == {"home"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(server: Server, tmp_path: Path, kind: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("set/a.csv")
        info.type = kind
        info.linkname = "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(UserError, match="no plain file"):
        get("it", tmp_path, sources=archived(server, "set.tar.gz", out.getvalue()))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["set.tar.gz", "set.zip"])
def test_what_is_no_archive_is_thrown_away(server: Server, tmp_path: Path, name: str) -> None:
    for content in (b"<html>sign in first</html>", tar_of(FILES)[:-200], zip_of(FILES)[:-30]):
        with pytest.raises(UserError, match="cannot be unpacked"):
            get("it", tmp_path, sources=archived(server, name, content))
        assert names(tmp_path) == set()


def test_without_a_network_the_message_says_which_file_to_put_where(tmp_path: Path) -> None:
    with Server({}) as closed:
        table = archived(closed, "set.zip", zip_of(FILES))
    with pytest.raises(UserError) as caught:
        get("it", tmp_path, sources=table)
    message = str(caught.value)
    assert table["it"].address in message and str(tmp_path / "set.zip") in message
    assert "\n" not in message
    assert names(tmp_path) == set()
    (tmp_path / "set.zip").write_bytes(closed.content["set.zip"])  # the user does what it says
    assert get("it", tmp_path, sources=table) == tmp_path / "set"
    assert names(tmp_path) == {"set"}


def test_a_file_that_is_gone_is_the_publishers_word(server: Server, tmp_path: Path) -> None:
    table = archived(server, "set.zip", b"")
    server.content.clear()
    with pytest.raises(UserError, match=r"cannot be fetched \(.*Not Found"):
        get("it", tmp_path, sources=table)


def test_two_downloads_of_one_set_do_not_mix(server: Server, tmp_path: Path) -> None:
    with (tmp_path / "big.csv.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is downloading"):
            get("it", tmp_path, sources=single(server))
    assert server.asked == []


def test_a_home_that_cannot_be_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept in"):
        get("it", tmp_path / "file", sources=single(server))


def test_names_are_checked(tmp_path: Path) -> None:
    for ask in (need, get):
        with pytest.raises(UserError, match="no data set mnist; there are cifar10, fraud, movielens"):
            ask("mnist", tmp_path)


def test_need_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`evenstep data get movielens`.*EVENSTEP_DATA"):
        need("movielens", tmp_path)
    (tmp_path / "ml-latest-small").mkdir()
    (tmp_path / "ml-latest-small" / "movies.csv").write_text("")
    with pytest.raises(UserError, match="not whole"):
        need("movielens", tmp_path)


def test_listing_tells_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "creditcard.csv").write_text("")
    found = {listed.name: listed for listed in listing(tmp_path)}
    assert list(found) == list(SOURCES)
    assert {name for name, listed in found.items() if listed.here} == {"fraud"}
    assert found["cifar10"].path == tmp_path / "cifar-10-batches-py"


def test_the_real_sets_are_what_their_publishers_shipped() -> None:
    for listed in listing(world.data_home()):
        assert listed.here, f"{listed.path} is not there: tests on real data need EVENSTEP_DATA"
        assert get(listed.name, world.data_home()) == listed.path


def test_every_set_has_checksums_that_decide() -> None:
    for name, source in SOURCES.items():
        assert source.files and all(len(m) == 32 for m in source.files.values()), name
        assert source.address.startswith("https://"), name
        assert all(file.split("/")[0] == source.place for file in source.files), name
        assert sources._safe(f"{source.place}/x", source)
