"""What happened in a run, on each rank: one JSON line per event, of three kinds.

`instant`: something happened.  `span`: something took time.  `scalar`: values of something, one per step.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

from evenstep.errors import UserError

LONGEST = 1 << 20  # bytes: no line comes near it


class Events:
    """Writes one rank's events, each as it happens; what a full disk does not take waits until it does."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        _drop_half_a_line(self._file)
        self._waiting = bytearray()
        self._lock = threading.Lock()

    def instant(self, name: str, **facts: Any) -> None:
        """Something happened."""
        self._write({"kind": "instant", "name": name, **facts})

    def span(self, name: str, seconds: float, **facts: Any) -> None:
        """Something took this long, until now."""
        self._write({"kind": "span", "name": name, "seconds": round(seconds, 6), **facts})

    def scalar(self, name: str, epoch: int, step: int, values: Sequence[float], **facts: Any) -> None:
        """Values in the steps step, step + 1, ... of an epoch."""
        self._write(
            {"kind": "scalar", "name": name, "epoch": epoch, "step": step, "values": list(values), **facts}
        )

    def _write(self, event: dict[str, Any]) -> None:
        line = (json.dumps({"time": round(time.time(), 6), **event}) + "\n").encode()
        with self._lock:
            self._waiting += line
        with contextlib.suppress(OSError):  # whoever needs them to be there asks
            self.flush()

    def flush(self) -> None:
        """Write what still waits; OSError where that cannot be."""
        with self._lock:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_half_a_line(file: FileIO) -> None:
    """What a kill or a full disk has cut off would take the next line with it."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, end - LONGEST))
    file.truncate(start + file.read().rfind(b"\n") + 1)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """A rank's events in order; a last line that was cut off by a kill is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _event(line, f"{path}, line {number},")


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    match found:
        case {"kind": str(), "name": str()}:
            return dict(found)
    raise UserError(f"{where} is no event of a run")


def losses_of(path: Path) -> list[float]:
    """The loss of every step of a run, in order; steps that a restart has undone are left out."""
    losses: list[float] = []
    for event in read_events(path):
        if event["name"] == "resumed":
            del losses[event["number"] :]
        elif event["kind"] == "scalar" and event["name"] == "loss":
            losses += event["values"]
    return losses
