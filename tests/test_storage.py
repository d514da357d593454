"""One contract, and every storage has to keep it: a folder, and fsspec's over local files, memory and S3."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import buckets
from evenstep.errors import UserError
from evenstep.snapshots import s3
from evenstep.snapshots.remote import Remote, Unreachable, make_sure, storage_at
from evenstep.snapshots.storage import BLOCK, Folder, Storage, in_blocks, why

Make = Callable[[], Storage]


def local(folder: Path) -> Remote:
    return Remote(fsspec.filesystem("file", skip_instance_cache=True), str(folder), "file")


@pytest.fixture(params=["folder", "local", "memory", "s3"])
def make(request: Any, tmp_path: Path, server: buckets.Server) -> Make:
    """Opens the same empty storage anew."""
    del server  # has to be up before the test begins
    match request.param:
        case "folder":
            return lambda: Folder(tmp_path / "kept")
        case "local":
            return lambda: local(tmp_path / "kept")
        case "memory":
            address = f"memory://{uuid.uuid4().hex}"
        case "s3":
            address = request.getfixturevalue("bucket")
    return lambda: storage_at(address)


def test_nothing_is_there_at_first(make: Make) -> None:
    storage = make()
    assert storage.files() == {}
    with pytest.raises(FileNotFoundError):
        storage.content("a", 1)
    storage.remove("a")


def test_what_was_written_is_there_for_everyone(make: Make) -> None:
    make().write("step/a.bin", [b"hello", memoryview(b" there")])
    make().write("b", [])
    assert make().files() == {"step/a.bin": 11, "b": 0}
    assert make().content("step/a.bin", 11) == b"hello there"
    assert b"".join(make().read("b")) == b""


def test_a_write_takes_the_place_of_what_was_there(make: Make) -> None:
    storage = make()
    for content in (b"long before", b"after"):
        storage.write("a", [content])
    assert storage.content("a", 100) == b"after"
    assert storage.files() == {"a": 5}


def test_what_is_removed_is_gone_and_the_rest_is_not(make: Make) -> None:
    storage = make()
    for path in ("step/a", "step/b", "c"):
        storage.write(path, [path.encode()])
    storage.remove("step/a")
    storage.remove("step/a")
    assert storage.files() == {"step/b": 6, "c": 1}
    storage.remove("step/b")
    assert storage.files() == {"c": 1}


def test_a_folder_of_it_is_a_storage(make: Make) -> None:
    storage = make()
    storage.write("one/a", [b"1"])
    storage.write("one/deep/b", [b"22"])
    storage.write("one-more/c", [b"333"])  # begins alike, and lies elsewhere
    assert storage.within("one").files() == {"a": 1, "deep/b": 2}
    assert storage.within("one").within("deep").content("b", 10) == b"22"
    storage.within("two").write("d", [b"4444"])
    assert storage.content("two/d", 10) == b"4444"


def test_files_of_many_blocks(make: Make) -> None:
    content = memoryview(bytes(range(256)) * (5 * BLOCK // 512))  # 2.5 blocks
    storage = make()
    storage.write("big", in_blocks(content))
    assert storage.files() == {"big": len(content)}
    blocks = [bytes(block) for block in storage.read("big")]
    assert max(map(len, blocks)) <= BLOCK
    assert b"".join(blocks) == content
    with pytest.raises(OSError, match="larger than"):
        storage.content("big", 1000)


@pytest.mark.parametrize("before", [None, b"before"], ids=["new", "in place"])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_write_that_breaks_off_leaves_what_was_there(make: Make, before: bytes | None, blocks: int) -> None:
    storage = make()
    if before is not None:
        storage.write("a", [before])

    def broken() -> Iterator[bytes]:
        for _ in range(blocks):
            yield bytes(BLOCK)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.write("a", broken())
    if before is None:
        assert "a" not in make().files()
    else:
        assert make().content("a", 100) == before


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file where a folder should be")
    with pytest.raises(OSError):
        Folder(tmp_path / "kept").files()


def test_a_folder_writes_through_to_the_disk(tmp_path: Path) -> None:
    Folder(tmp_path).write("a/b/c", [b"1"])
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c"], "no temporary file is left"


# Addresses


def test_an_address_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    for address in (str(tmp_path), f"file://{tmp_path}"):
        found = storage_at(address)
        assert isinstance(found, Folder)
        assert found.path == tmp_path
        make_sure(found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("/no/such/folder", "/no/such/folder: there is no such folder; make it, or name another"),
        ("nonsense://a/b", "no storage is known by nonsense://; take s3://bucket/prefix"),
        ("s3://", "s3:// names no place; it is s3://bucket/prefix, say"),
        ("gs://bucket/a", "gs://bucket/a: Please install gcsfs"),
    ],
)
def test_an_address_that_leads_nowhere_is_said_to(address: str, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        storage_at(address)
    assert complaint in str(raised.value)


def test_a_place_that_works_is_left_as_it_was(bucket: str) -> None:
    make_sure(storage_at(bucket))
    assert storage_at(bucket).files() == {}


@pytest.mark.parametrize(
    ("changed", "address", "complaint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "are the credentials right (for S3 AWS_ACCESS_KEY_ID and"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, None, "are the credentials right"),
        (
            {"AWS_ACCESS_KEY_ID": buckets.READER, "AWS_SECRET_ACCESS_KEY": buckets.READERS_SECRET},
            None,
            "may they read and write there?",
        ),
        (
            {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "HOME": "/nowhere"},
            None,
            "are the credentials",
        ),
        ({}, "s3://no-such-bucket/a", "The specified bucket does not exist; make the bucket or the folder first"),
        ({}, "s3://no/a", "The specified bucket is not valid; is the address right"),
    ],
    ids=["secret", "key", "may only read", "no credentials", "no bucket", "no name of a bucket"],
)
def test_a_place_that_does_not_work_is_said_to_with_what_to_do(
    changed: dict[str, str | None],
    address: str | None,
    complaint: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(UserError) as raised:
        make_sure(storage_at(address or bucket))
    assert complaint in str(raised.value)
    assert str(raised.value).startswith(address or bucket)
    assert not isinstance(raised.value, Unreachable), "it will not come to work by itself"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fault", [503, 500, "drop"])
def test_a_place_that_is_away_may_come_back(
    fault: int | str, bucket: str, server: buckets.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with buckets.proxy_before(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        storage = storage_at(bucket)
        proxy.fault = lambda _: fault
        with pytest.raises(Unreachable, match="can it be reached from here"):
            make_sure(storage)
        with pytest.raises(OSError):
            storage.files()
        proxy.fault = lambda _: None
        make_sure(storage)


def test_one_fault_is_nobodys_business(
    bucket: str, server: buckets.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([503])
    with buckets.proxy_before(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        storage = storage_at(bucket)
        proxy.fault = lambda request: next(faults, None) if request.method == "PUT" else None
        storage.write("a", [b"1"])
        assert storage.content("a", 1) == b"1"


@pytest.mark.parametrize("size", [1000, 2 * BLOCK + 1000], ids=["small", "of many parts"])
def test_an_upload_that_is_cut_is_none(
    size: int, bucket: str, server: buckets.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with buckets.proxy_before(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        storage = storage_at(bucket)
        storage.write("a", [b"before"])
        proxy.fault = lambda request: "cut" if request.method == "PUT" and len(request.body) >= 1000 else None
        with pytest.raises(OSError):
            storage.write("a", in_blocks(memoryview(bytes(size))))
        proxy.fault = lambda _: None
        assert storage.content("a", 100) == b"before"


def test_a_server_that_is_silent_is_found_out(
    bucket: str, server: buckets.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "ANSWERED_WITHIN", 0.2)
    storage = storage_at(bucket)
    server.pause()
    try:
        with pytest.raises(OSError):
            storage.write("a", [b"1"])
    finally:
        server.go_on()
    storage.write("b", [b"2"])  # "a" may yet arrive, or not
    assert storage.content("b", 1) == b"2"


def test_the_words_for_what_went_wrong() -> None:
    assert why(OSError(28, "No space left on device")) == "No space left on device"
    assert why(OSError("Access\n Denied.")) == "Access Denied"
    assert why(TimeoutError()) == "TimeoutError"
    assert why(json.JSONDecodeError("no", "", 0)) == "JSONDecodeError: no: line 1 column 1 (char 0)"
