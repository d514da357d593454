"""How far a training has come: with the tensors, all it takes to go on."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenstep.order.digest import Digest

Values = dict[str, Any]


class Window(NamedTuple):
    """Some steps of an epoch, from `first` on."""

    first: int
    losses: list[float]
    """The mean loss of each, over all ranks."""
    totals: list[int]
    """The samples in each, over all ranks."""
    seconds: float
    digest: Digest
    """Of the samples that this rank trained on."""
    left_out: Digest = Digest()
    """Of those in steps that were left out, as their losses or gradients were not finite."""

    @property
    def samples_per_second(self) -> float:
        return sum(self.totals) / max(self.seconds, 1e-9)

    @property
    def bad(self) -> list[int]:
        """The steps whose loss is not finite, by their number in the epoch."""
        return [step for step, loss in enumerate(self.losses, start=self.first) if not math.isfinite(loss)]


@dataclass(kw_only=True)
class Progress:
    """Grows with the training, the same on all ranks."""

    session: str = ""
    """The time between a start and the next in which it has come this far."""
    epoch: int = 0
    step: int = 0
    """Of the epoch, that comes next."""
    number: int = 0
    """Steps in all."""
    samples: int = 0
    skipped: int = 0
    """Steps that were left out, as their losses or gradients were not finite."""
    seconds: float = 0.0
    epoch_samples: int = 0
    epoch_seconds: float = 0.0
    epoch_loss: float = 0.0
    """The sum over the epoch's samples so far."""
    final: Values = field(default_factory=dict)
    best: Values = field(default_factory=dict)
    best_epoch: int = 0
    best_score: float = -math.inf

    def add(self, window: Window) -> None:
        """Some more steps are done."""
        trained = [(loss, n) for loss, n in zip(window.losses, window.totals, strict=True) if math.isfinite(loss)]
        samples = sum(total for _, total in trained)
        self.skipped += len(window.losses) - len(trained)
        self.samples += samples
        self.epoch_samples += samples
        self.seconds += window.seconds
        self.epoch_seconds += window.seconds
        self.epoch_loss += sum(loss * total for loss, total in trained)

    def measured(self, values: Values, score: float) -> bool:
        """What the epoch came to; whether it is the best so far. Where nothing is measured, the latest is."""
        self.final = values
        improved = self.epoch == 0 or not values or score > self.best_score
        if improved:
            self.best, self.best_epoch, self.best_score = values, self.epoch, score
        return improved

    def without_best(self, before: "Progress") -> None:
        """The best is what it was: what was found since could not be kept."""
        self.best, self.best_epoch, self.best_score = before.best, before.best_epoch, before.best_score

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch, self.step = self.epoch + 1, 0
        self.epoch_samples, self.epoch_seconds, self.epoch_loss = 0, 0.0, 0.0

    def as_dict(self) -> dict[str, Any]:
        """As a snapshot keeps it; `Progress.of(it)` is the same again."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "Progress":
        """From what a snapshot kept; ValueError where no training has come so far."""
        fresh = cls()
        if kept.keys() != fresh.as_dict().keys():
            raise ValueError(f"{', '.join(sorted(kept))} are not what is kept of it")
        for name, value in kept.items():
            usual = getattr(fresh, name)
            alike = isinstance(value, int | float) if isinstance(usual, float) else type(value) is type(usual)
            if not alike or (isinstance(usual, int) and not 0 <= value < 1 << 62):
                raise ValueError(f"{name} is {value!r:.40}")
        return cls(**kept)

    def outcome(self) -> Mapping[str, Any]:
        """What a record keeps of it at the end."""
        return {
            "epochs": self.epoch + 1,
            "steps": self.number,
            "samples": self.samples,
            "steps_left_out": self.skipped,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds if self.seconds else 0.0,
            "final": self.final,
            "best": self.best,
            "best_epoch": self.best_epoch,
        }
