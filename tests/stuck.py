"""A task whose ranks get stuck, fail or differ, in the way that an option says."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep import Columns, Task

LONG = 1000.0


def place() -> tuple[int, int]:
    """Rank and world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@dataclass(frozen=True, kw_only=True)
class Stuck(Task):
    """Learns quickly, until `rank` comes to `at` calls of losses, and does what `way` says, once."""

    way: str = ""
    rank: int = 1
    at: int = 40
    once: str = ""
    """A file that says that it has happened; it happens again where none is named."""
    row_by_row: bool = False
    size: int = 64

    def data(self, split: str) -> Any:
        if split != "train":
            return None
        x = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(1))
        columns = Columns(x=x, y=x.sum(1), number=torch.arange(self.size))
        return Rows(columns, self) if self.row_by_row else columns

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if self.way and model.training and self.now():
            self.happen(self.way)
        time.sleep(0.005)
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")

    def now(self) -> bool:
        calls = vars(self).setdefault("calls", [0])
        calls[0] += 1
        if calls[0] != self.at or place()[0] != self.rank:
            return False
        if not self.once:
            return True
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def happen(self, way: str) -> None:
        match way:
            case "sleep":
                time.sleep(LONG)
            case "lock":
                re.match("(a+)+b", "a" * 60)  # takes for ever, and the interpreter with it
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "leave":
                os._exit(0)


class Rows:
    """The same, read sample by sample."""

    def __init__(self, columns: Columns, task: Stuck) -> None:
        self.columns = columns
        self.task = task

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.columns[index]
