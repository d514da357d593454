"""What every test stands on: nothing it started is left behind, quick tests come first, real data is there."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import psutil
import pytest
import sklearn.datasets  # noqa: F401 - sets variables of the environment when it is first loaded

import buckets
import commands
import evenstep.api

GRACE = 30.0  # seconds that what was told to end may take, on a busy machine
KEPT_BY_TORCH = "torch/_inductor/compile_worker"  # compilers that stay for the next torch.compile
KEPT_BY_FSSPEC = ("fsspecIO", "asyncio_")  # its loop, and who looks addresses up for it
SHM = Path("/dev/shm")

_PR_SET_CHILD_SUBREAPER = 36
_temporary = Path()


def pytest_configure(config: pytest.Config) -> None:
    """Make sure that whatever tests leave can be found."""
    config.addinivalue_line("markers", "slow: takes seconds, so it runs after the others")
    # children of children that lose their parent become ours, so that we see them
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    global _temporary
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _temporary = Path(tempfile.mkdtemp(prefix="es-"))  # short: the names of sockets have at most 108 letters
    os.environ["TMPDIR"] = tempfile.tempdir = str(_temporary)


def pytest_unconfigure() -> None:
    util._run_finalizers()  # multiprocessing's own, which would miss their folder later
    shutil.rmtree(_temporary, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first."""
    for item in items:
        if "real_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets."""
    folder = os.environ.get("EVENSTEP_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.fail(
            f"this test needs the real data sets, and EVENSTEP_DATA is {folder!r}, which is no folder: "
            "python ../shared/data/unpack DEST unpacks them, then set EVENSTEP_DATA to DEST",
            pytrace=False,
        )
    return Path(folder)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[buckets.Server]:
    """A real object store, for all tests."""
    found = buckets.Server(tmp_path_factory.mktemp("s3"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def bucket(server: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of the test's own in the object store, to which the environment leads."""
    for name, value in buckets.variables(server.endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{buckets.BUCKET}/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def evenstep(tmp_path: Path) -> Any:
    """Run `evenstep words...` in a folder of the test's own, to its end."""

    def run(*words: str, **settings: Any) -> commands.Ran:
        return commands.run(*words, **{"folder": tmp_path, **settings})

    return run


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves something behind: processes, threads, ports, shared memory, files, variables."""
    before = _Seen()
    yield
    left = before.left()
    end = time.monotonic() + GRACE
    while left and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
        left = before.left()
    before.restore()
    if left:
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)


class _Seen:
    """What there is now, apart from what is ours to keep."""

    def __init__(self) -> None:
        self.processes = _processes()
        self.threads = set(threading.enumerate())
        self.ports = _ports()
        self.shared = _shared()
        self.files = _files()
        self.variables = dict(os.environ)

    def left(self) -> list[str]:
        """What there was not before, in words."""
        found = [_told(process) for process in _processes() - self.processes]
        threads = [thread for thread in threading.enumerate() if thread not in self.threads]
        found += [f"thread {thread.name}" for thread in threads if not thread.name.startswith(KEPT_BY_FSSPEC)]
        found += [f"port {port}" for port in _ports() - self.ports]
        found += [f"shared memory {name}" for name in _nobodys(_shared() - self.shared)]
        found += [f"{path}" for path in _files() - self.files]
        now = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        was = {name: value for name, value in self.variables.items() if name != "PYTEST_CURRENT_TEST"}
        found += [f"variable {name}" for name, _ in sorted(set(now.items()) ^ set(was.items()))]
        return found

    def restore(self) -> None:
        """Let the next test start from the same."""
        for process in _processes() - self.processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for path in _files() - self.files:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        for name in set(os.environ) | set(self.variables):
            if name in self.variables:
                os.environ[name] = self.variables[name]
            else:
                del os.environ[name]


def _processes() -> set[psutil.Process]:
    """All that descend from this process, but for those that serve all tests."""
    ours = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)  # one that lost its parent
            elif process.pid not in ours and KEPT_BY_TORCH not in " ".join(process.cmdline()):
                found.add(process)
    return found


def _told(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid} ({' '.join(process.cmdline())[:200]})"
    return f"process {process.pid}"


def _ports() -> set[int]:
    """Those this process listens at."""
    found = psutil.Process().net_connections("inet")
    return {int(connection.laddr.port) for connection in found if connection.status == psutil.CONN_LISTEN}


def _shared() -> set[str]:
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def _nobodys(names: set[str]) -> set[str]:
    """Of these pieces of shared memory, those that no process uses: other programs have theirs there too."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"{SHM}/{name}" not in text}
    return {name for name in names if (SHM / name).exists()}


def _files() -> set[Path]:
    """Temporary ones, but for the folder of this process's sockets."""
    sockets = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    return {path for path in _temporary.iterdir() if str(path) != sockets}
