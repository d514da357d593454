"""The record of one run: what ran, where, when, how it ended, and what came of it."""

import hashlib
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from evenstep.config import Config
from evenstep.errors import UserError
from evenstep.files import RunFiles, write_json
from evenstep.world import World

PACKAGES = ("evenstep", "torch", "numpy", "torchmetrics", "torchvision", "timm")


def now() -> str:
    """This moment, as records keep it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def open_record(files: RunFiles, config: Config, place: World, device: str, command: Sequence[str]) -> None:
    """Write the record of a run that starts now, in this process."""
    started = {
        "state": "running",
        "task": config.task,
        "model": config.model,
        "strategy": config.strategy,
        "note": config.note,
        "command": list(command),
        "folder_it_ran_in": str(Path.cwd()),
        "started": now(),
        "process": _process(),
        "world": {"processes": place.size, "nodes": config.nodes, "device": device},
        "code": _code(Path.cwd()),
        "packages": _packages(),
        "hardware": _hardware(),
    }
    write_json(files.record, started)


def close_record(files: RunFiles, state: str, **facts: Any) -> None:
    """Say how a run ended: finished, stopped or failed."""
    amend(files, state=state, ended=now(), **facts)


def read(files: RunFiles) -> dict[str, Any]:
    """A run's record; a run that says it is running, but whose process is gone, was killed."""
    try:
        record: dict[str, Any] = json.loads(files.record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{files.folder} holds no record of a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the record in {files.folder} cannot be read: {error}") from None
    if record["state"] == "running" and _gone(record["process"]):
        record["state"] = "killed"
    return record


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
        same = abs(found.create_time() - process["created"]) < 1  # else the number was given out again
        return not same or found.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _code(folder: Path) -> dict[str, Any]:
    """The commit of the code that runs, and a hash of what differs from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None}
    difference = _git(folder, "diff", "HEAD") or ""
    changed = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit.strip(), "difference_sha256": changed}


def _git(folder: Path, *words: str) -> str | None:
    try:
        # a prompt for a password, or a lock, must not hold up a training
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=10, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


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
