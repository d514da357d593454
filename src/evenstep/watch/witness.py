"""What a rank knows of itself, and of the others on its host, when no step ends."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch.distributed as dist

from evenstep.watch import pulse, stacks
from evenstep.watch.culprits import Condition, Helper, Statement
from evenstep.watch.patience import Stillness
from evenstep.watch.pulse import Where
from evenstep.watch.stacks import TORCH
from evenstep.world import World

LOADER = f"{TORCH}utils{os.sep}data{os.sep}dataloader.py"
FETCHING = f"{TORCH}utils{os.sep}data{os.sep}_utils{os.sep}fetch.py"
NOBODY = {"host": "an unknown host", "pid": 0, "created": 0.0, "thread": 0}  # a rank that never left a note
CLOCKS_ARE_SET_BY = 60.0  # seconds
CONDITIONS = {
    psutil.STATUS_ZOMBIE: Condition.GONE,
    psutil.STATUS_STOPPED: Condition.STOPPED,
    psutil.STATUS_TRACING_STOP: Condition.TRACED,
}


class Witness:
    """Of the rank whose training thread makes it."""

    def __init__(self, place: World, stillness: Stillness, name: str) -> None:
        self.place = place
        self.stillness = stillness
        self.name = name
        self._trains = threading.get_ident()
        self._who = {"host": place.host, "pid": os.getpid(), "created": psutil.Process().create_time()}

    def sign(self) -> dict[str, Any]:
        """What a rank says of itself as long as it lives."""
        return {**self._who, "thread": self._trains, **self._place(), "exchanges": _exchanges()}

    def own(self) -> Statement:
        """All about this rank."""
        known = self.sign()
        stack = stacks.of_thread(known.pop("thread"))
        reads = any(frame.file.endswith(LOADER) for frame in stack)
        return Statement(
            rank=self.place.rank,
            condition=Condition.ANSWERS,
            stack=stack,
            helpers=tuple(_helpers()) if reads else (),
            **known,
        )

    def of(self, rank: int, note: Mapping[str, Any] | None) -> Statement:
        """What another rank's last note says, and what is to be seen of it, if it is on this host."""
        known = {**NOBODY, **self._place(), **(note["sign"] if note else {})}
        where, thread = Where(*known["where"]), known.pop("thread")
        condition, stack = Condition.SILENT, stacks.Stack()
        if note and note["done"]:
            condition = Condition.DONE
        elif known["host"] == self.place.host:
            condition = _condition(known["pid"], known["created"])
            where = pulse.seen(known["pid"], self.name) or where
            stack = stacks.ask(known["pid"], thread) if condition is Condition.SILENT else ()
        seen = {
            "where": where,
            "still": max(known["still"], self.stillness.still),  # the ranks move together
            "patience": self.stillness.patience.at(where),
        }
        return Statement(rank=rank, condition=condition, stack=stack, **{**known, **seen})

    def _place(self) -> dict[str, Any]:
        still = self.stillness
        return {"where": still.where, "still": still.still, "patience": still.patience.at(still.where)}


def _condition(pid: int, created: float) -> Condition:
    """How a process of this host is, that does not answer."""
    try:
        process = psutil.Process(pid)
        return _seen(process) if same(process, created) else Condition.GONE
    except psutil.NoSuchProcess:
        return Condition.GONE


def same(process: psutil.Process, created: float) -> bool:
    """Whether it is the one that was created then: clocks are set, and pids are used again."""
    return bool(abs(process.create_time() - created) < CLOCKS_ARE_SET_BY)


def _seen(process: psutil.Process) -> Condition:
    return CONDITIONS.get(process.status(), Condition.SILENT)


def _exchanges() -> int | None:
    """How many collectives this rank has begun."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    return None if group is None else int(group._get_sequence_number_for_group())


def _helpers() -> Iterator[Helper]:
    """The data loading processes of this rank that are at work, or that are stopped."""
    for process in multiprocessing.active_children():
        with contextlib.suppress(psutil.Error):
            assert process.pid is not None
            stopped = _seen(psutil.Process(process.pid)) is Condition.STOPPED
            stack = () if stopped else stacks.ask(process.pid)
            if stopped or any(frame.file.endswith(FETCHING) for frame in stack):
                yield Helper(pid=process.pid, stopped=stopped, stack=stack)
