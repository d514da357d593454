"""The record of one run: what ran, where, when, how it ended, and what came of it."""

import dataclasses
import hashlib
import json
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from evenstep.config import Config
from evenstep.errors import UserError
from evenstep.files import RunFiles, write_json
from evenstep.order.plan import Plan
from evenstep.progress import Progress
from evenstep.watch.drift import Summary
from evenstep.world import World

CLOCKS_ARE_SET_BY = 60.0  # seconds; a process's start is told by the clock, which may be put right meanwhile
OF_AN_END = ("ended", "error", "rank", "test", *Progress().outcome())  # none of it is true of a run that goes on
PACKAGES = ("evenstep", "torch", "numpy", "torchmetrics", "torchvision", "timm")


def now() -> str:
    """This moment, as records keep it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def identity(files: RunFiles) -> str:
    """What tells this run from all others, also those of its name; a new one where there is no record yet."""
    return str(read(files).get("run")) if files.record.is_file() else uuid.uuid4().hex


def open_record(
    files: RunFiles, run: str, config: Config, plan: Plan, place: World, device: str, command: Sequence[str]
) -> None:
    """Write the record of a run that starts now in this process, or that goes on in it."""
    now_here = {
        "state": "running",
        "process": _process(),
        "world": {"processes": place.size, "nodes": place.size // place.local_size, "device": device},
    }
    if files.record.is_file():
        before = json.loads(files.record.read_text(encoding="utf-8"))
        again = {"time": now(), "processes": place.size, "after": before["state"], "command": list(command)}
        going_on = {"strategy": config.strategy, "resumed": [*before.get("resumed", []), again]}
        begun = {name: value for name, value in before.items() if name not in OF_AN_END}
        write_json(files.record, {**begun, **now_here, **going_on})
        return
    started = {
        **now_here,
        "run": run,
        "task": config.task,
        "model": config.model,
        "strategy": config.strategy,
        "note": config.note,
        "command": list(command),
        "folder_it_ran_in": str(Path.cwd()),
        "started": now(),
        "code": _code(Path.cwd()),
        "packages": _packages(),
        "hardware": _hardware(),
        "plan": dataclasses.asdict(plan),
    }
    write_json(files.record, started)


def keep_fingerprint(files: RunFiles, own: Summary, drift: Sequence[str], changed: Sequence[str]) -> None:
    """What ran, as it was when the run began; in what its ranks differed; what has changed since."""
    before = json.loads(files.record.read_text(encoding="utf-8"))
    facts: dict[str, Any] = {} if "fingerprint" in before else {"fingerprint": own}
    if drift:
        facts["drift"] = [*before.get("drift", []), {"time": now(), "between_ranks": list(drift)}]
    if changed:
        facts["changed"] = [*before.get("changed", []), {"time": now(), "what": list(changed)}]
    if facts:
        amend(files, **facts)


def kept_fingerprint(files: RunFiles) -> Summary:
    """What ran when the run began; nothing where that is not known."""
    if not files.record.is_file():
        return {}
    found: Summary = read(files).get("fingerprint", {})
    return found


def close_record(files: RunFiles, state: str, **facts: Any) -> None:
    """Say how a run ended: finished, stopped or failed."""
    amend(files, state=state, ended=now(), **facts)


def read(files: RunFiles) -> dict[str, Any]:
    """A run's record; a run that says it is running, but whose process is gone, was killed."""
    try:
        record = json.loads(files.record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{files.folder} holds no record of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the record in {files.folder} cannot be read: {error}") from None
    match record:
        case {"state": str(state), "process": {"host": str(), "pid": int(pid), "created": float()} as process} if (
            pid > 0
        ):
            return {**record, "state": "killed"} if state == "running" and _gone(process) else record
    raise UserError(f"{files.record} is not the record of a run")


def amend(files: RunFiles, **facts: Any) -> None:
    """Add to a run's record, in one atomic step."""
    write_json(files.record, {**json.loads(files.record.read_text(encoding="utf-8")), **facts})


def _process() -> dict[str, Any]:
    own = psutil.Process()
    return {"host": socket.gethostname(), "pid": own.pid, "created": own.create_time()}


def _gone(process: Mapping[str, Any]) -> bool:
    """Whether the process has ended, as far as this host can tell."""
    if process["host"] != socket.gethostname():
        return False
    try:
        found = psutil.Process(process["pid"])
        same = abs(found.create_time() - process["created"]) < CLOCKS_ARE_SET_BY
        return not same or found.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _code(folder: Path) -> dict[str, Any]:
    """The commit of the code that runs, and a hash of what differs from it.

    What git has not been told of counts as well, where it is Python: a new task's file is seldom committed yet.
    """
    commit, top = _git(folder, "rev-parse", "HEAD"), _git(folder, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return {"commit": None}
    root = Path(os.fsdecode(top.removesuffix(b"\n")))
    changed = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    found = {"commit": commit.decode().strip(), "difference_sha256": "unknown"}  # git was too slow, say
    if changed is None or new is None:
        return found
    names = sorted(name for name in new.split(b"\0") if name)
    parts = [changed, *(part for name in names for part in (name, _bytes(root / os.fsdecode(name))))]
    hashed = hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()
    return {**found, "difference_sha256": hashed if changed or names else None}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone again, or a link to nowhere
        return b""


def _git(folder: Path, *words: str) -> bytes | None:
    try:
        # a prompt for a password, or a lock, must not hold up a training
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=10, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _packages() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    import torch

    return {
        "machine": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
