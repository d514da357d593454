"""Where a rank is in its training: told by plain stores into a piece of memory, at which others look now and then.

Other processes of its host can look at it as well, so that they see where a rank is that cannot answer.
"""

import contextlib
import ctypes
import mmap
from typing import NamedTuple

from evenstep.watch import memory, words

NAME = "evenstep-pulse"

PHASES = (
    "start",
    "data",
    "forward",
    "backward and sync",
    "update",
    "comparing notes",
    "snapshot",
    "first evaluation",
    "evaluate",
    "metrics",
    "keeping weights",
)
"""In the order in which a rank comes through them."""
START, DATA, FORWARD, BACKWARD, UPDATE, NOTES, SNAPSHOT, FIRST, EVALUATE, METRICS, WEIGHTS = range(len(PHASES))
OF_A_STEP = (DATA, FORWARD, BACKWARD, UPDATE, NOTES)


class Where(NamedTuple):
    """A place in a training."""

    epoch: int
    step: int
    """Of the epoch."""
    piece: int
    """The micro-batch of a step, or the batch of an evaluation."""
    phase: int

    @property
    def in_words(self) -> str:
        """As a person counts."""
        phase = PHASES[self.phase]
        if self.phase == START:
            return phase
        if self.phase in (FIRST, EVALUATE, METRICS, WEIGHTS):
            return f"{phase} after epoch {self.epoch + 1}"
        return f"{phase} of {words.step(self.epoch, self.step)}"


class Pulse(ctypes.Structure):
    """Where a rank is. To tell it costs a store: nobody is notified, nothing is locked."""

    taken: int
    """Steps, by this process."""
    evaluated: int
    """Passes over other data."""
    epoch: int
    step: int
    piece: int
    phase: int

    _fields_ = [(name, ctypes.c_int64) for name in ("taken", "evaluated", "epoch", "step", "piece", "phase")]

    def where(self) -> Where:
        """The place as it is now."""
        return Where(self.epoch, self.step, self.piece, self.phase)


def shown(name: str) -> Pulse:
    """A pulse that the other processes of this host can see."""
    file = memory.made(f"{NAME}-{name}")
    if file is None:
        return Pulse()
    with file:
        file.truncate(mmap.PAGESIZE)
        return Pulse.from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))  # it keeps the memory


def seen(pid: int, name: str) -> Where | None:
    """Where another process of this host is, or was last."""
    file = memory.of_process(pid, f"{NAME}-{name}")
    with contextlib.suppress(OSError, ValueError):
        return None if file is None else Pulse.from_buffer_copy(file.read_bytes()).where()
    return None
