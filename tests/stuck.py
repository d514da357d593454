"""A task whose ranks get stuck, fail or differ, in ways that an option lists."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep import Columns, Task

LONG = 1000.0
FATEFUL = 17  # the sample at which reading gets stuck


class LeftOut(Exception):
    """This rank leaves out an exchange."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, kw_only=True)
class Stuck(Task):
    """Learns quickly, until a rank has computed, or a process has read, so many batches, or samples.

    Then the first of the `ways` happens that has not happened yet, in whichever process gets there first.
    """

    ways: str = ""
    """Separated by commas."""
    folder: str = ""
    """Gets a file for each way that has happened, with the pid of the process in which it has."""
    rank: int = 1
    """Where what happens in computing does."""
    at: int = 30
    meets: bool = False
    """The ranks take part in an exchange of their own in each step."""
    row_by_row: bool = False
    size: int = 60
    nan: int = -1
    """A sample that is not finite."""

    def data(self, split: str) -> Any:
        if split == "test":
            return None
        x = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(1))
        columns = Columns(x=x, y=x.sum(1))
        if self.nan >= 0 and split == "train":
            x[self.nan] = float("nan")
        return Rows(columns, self) if self.row_by_row and split == "train" else columns

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(0.002)
        losses = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")
        with contextlib.suppress(LeftOut):
            if model.training and rank() == self.rank and self._is_time("computed", self.at):
                losses = self._happens(COMPUTING, losses)
            if self.meets:
                dist.all_gather_object([None] * dist.get_world_size(), None)
        return losses

    def _is_time(self, what: str, at: int) -> bool:
        counted = vars(self).setdefault("counted", {})
        counted[what] = counted.get(what, 0) + 1
        return bool(counted[what] == at)

    def _happens(self, ways: Mapping[str, Any], value: Any) -> Any:
        """The next way, if it is one of these."""
        for number, way in enumerate(filter(None, self.ways.split(","))):
            happened = Path(self.folder) / f"{number}-{way}"
            if happened.exists():
                continue
            if way not in ways:
                return value
            try:
                handle = os.open(happened, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            os.write(handle, str(os.getpid()).encode())
            os.close(handle)
            return ways[way](value)
        return value


class Rows:
    """The same, read sample by sample."""

    def __init__(self, columns: Columns, task: Stuck) -> None:
        self.columns = columns
        self.task = task
        self.read = 0

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        if index == FATEFUL and self.read > 2 * self.task.at:  # one process an epoch comes to it
            self.task._happens(READING, None)
        return self.columns[index]


# What can happen


def sleep(value: Any) -> Any:
    time.sleep(LONG)
    return value


def nap(value: Any) -> Any:
    time.sleep(4)
    return value


def lock(value: Any) -> Any:
    re.match("(a+)+b", "a" * 60)  # takes for ever, and does not let go of the interpreter
    return value


def stop(value: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return value


def leave(value: Any) -> Any:
    del value
    os._exit(0)


def memory(value: Any) -> Any:
    return [value, torch.empty(1 << 60)]


def nan(value: Any) -> Any:
    return value * float("nan")


def gradient(value: Any) -> Any:
    """The loss stays as it is, and its gradient is not finite."""
    return value + (value * 0).sqrt()


def skip(value: Any) -> Any:
    del value
    raise LeftOut


COMPUTING = {one.__name__: one for one in (sleep, nap, lock, stop, leave, memory, nan, gradient, skip)}
READING = {"read": sleep, "read-stop": stop}
