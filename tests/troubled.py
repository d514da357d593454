"""A task that comes to grief: on one rank, after so many batches, in a way that is asked for."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

import tiny

_batches = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Troubled(tiny.Tiny):
    """Trains as Tiny does, until it does not."""

    trouble: str = "none"
    others: str = "none"
    on: int = 1
    after: int = 6
    once: bool = False

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if next(_batches) == self.after and self._comes():
            TROUBLES[self.trouble if os.environ.get("RANK", "0") == str(self.on) else self.others]()
        return super().losses(model, batch)

    def _comes(self) -> bool:
        """Whether it is the first time, where it should come once."""
        mark = Path(f"trouble came to {os.environ.get('RANK', '0')}")
        if self.once and mark.exists():
            return False
        mark.touch()
        return True


def _fail() -> None:
    raise ValueError("a mistake in the user's own code")


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(600)


TROUBLES: Mapping[str, Callable[[], object]] = {
    "none": lambda: None,
    "fail": _fail,
    "be killed": _be_killed,
    "leave at once": lambda: os._exit(0),
    "leave": lambda: sys.exit(3),
    "abort": os.abort,
    "run out of memory": lambda: bytearray(1 << 62),
    "hang": _hang,
}
