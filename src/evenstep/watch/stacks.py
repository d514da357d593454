"""Where a process is, line by line: this one, and others of this training on the same host.

Another process answers a signal by writing its stack into memory of its own that those on its host can read.
That needs nothing of its interpreter, so it works while some C code holds the interpreter's lock. A process
that is stopped answers nothing.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from evenstep.watch import memory

NAME = "evenstep-stack"
ANSWERS_WITHIN = 0.3  # seconds; it is the kernel and a few lines of C that answer
LOOK = 0.01
OURS = str(Path(__file__).parent.parent)
LIBRARIES = (str(Path(os.__file__).parent), "site-packages", "dist-packages", "<frozen", "<string>")
TORCH = f"{os.sep}torch{os.sep}"
COLLECTIVES = f"{TORCH}distributed{os.sep}"
BEGINNINGS = (f"{OURS}{os.sep}training.py", f"{TORCH}utils{os.sep}data{os.sep}_utils{os.sep}worker.py")

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_answer: IO[bytes] | None = None


class Frame(NamedTuple):
    """A line that a process is in."""

    file: str
    line: int
    function: str

    @property
    def users(self) -> bool:
        """Whether it is neither ours nor a library's."""
        return not self.file.startswith(OURS) and not any(part in self.file for part in LIBRARIES)

    @property
    def in_words(self) -> str:
        """As a person finds it."""
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]  # the innermost frame is the last


def of_thread(thread: int) -> Stack:
    """The stack of a thread of this process."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return ()
    walked = traceback.walk_stack(innermost)
    found = [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    return tuple(reversed(found))


def as_text(stack: Sequence[Frame]) -> str:
    """As tracebacks look."""
    lines = traceback.StackSummary.from_list([(file, line, function, None) for file, line, function in stack])
    return "".join(traceback.format_list(lines))


def from_the_loop_on(stack: Stack) -> Stack:
    """Without what is the same in every training: how its process was started."""
    begins = [number for number, frame in enumerate(stack) if frame.file.endswith(BEGINNINGS)]
    return stack[begins[-1] + 1 :] if begins else stack


def telling(stack: Stack) -> Frame | None:
    """The line that says most: the innermost of the user's own, else the innermost there is."""
    return next((frame for frame in reversed(stack) if frame.users), stack[-1] if stack else None)


# Of other processes


def answer_when_asked() -> None:
    """Let others on this host ask this process for its stack."""
    global _answer
    if _answer is None:
        _answer = memory.made(NAME)
        if _answer is not None:
            faulthandler.register(_signal(), _answer, all_threads=True)


def ask(pid: int, thread: int | None = None) -> Stack:
    """The stack of a thread of another process, or of its first one; empty if it does not answer."""
    answer = memory.of_process(pid, NAME)
    if answer is None:
        return ()
    with contextlib.suppress(OSError), answer.open("rb") as file:
        before = file.seek(0, os.SEEK_END)
        os.kill(pid, _signal())
        found = _stacks(_written(file, before))
        return found.get(thread, ()) if thread is not None else next(reversed(found.values()), ())
    return ()


def _written(file: IO[bytes], before: int) -> str:
    """What is written from there on, once no more comes."""
    deadline = time.monotonic() + ANSWERS_WITHIN
    answer, earlier = b"", b""
    while time.monotonic() < deadline and not (answer and answer == earlier):
        time.sleep(LOOK)
        earlier = answer
        file.seek(before)
        answer = file.read()
    return answer.decode(errors="replace")


def _signal() -> int:
    """One that neither schedulers nor people send."""
    return signal.SIGRTMIN + 7


def _stacks(text: str) -> dict[int, Stack]:
    """By thread, the latest first, out of what faulthandler writes."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found.setdefault(int(thread[1], 16), [])
        elif frame := _LINE.fullmatch(line):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return {thread: tuple(reversed(frames)) for thread, frames in found.items()}
