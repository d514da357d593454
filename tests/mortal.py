"""A task whose training ends where a test says, in mid-epoch and in mid-write, as if the machine had failed."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tiny import Tiny


@dataclass(frozen=True, kw_only=True)
class Mortal(Tiny):
    """Tiny, with dropout, and with an end to come: `fate` is a file with a number of steps and a way to end.

    `5 raise` fails in the sixth step of a process; `5 kill` is kill -9.
    """

    fate: str
    dropout: float = 0.0
    _taken: list[int] = field(default_factory=list, init=False, repr=False)

    def model(self) -> nn.Module:
        return nn.Sequential(super().model()[:-1], nn.Dropout(self.dropout), nn.Linear(5, 1))  # type: ignore[index]

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if model.training:
            self._meet_fate()
        return super().losses(model, batch)

    def _meet_fate(self) -> None:
        path = Path(self.fate)
        steps, how = path.read_text().split() if path.exists() else ("-1", "")
        if len(self._taken) == int(steps):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("its time has come")
        self._taken.append(1)
