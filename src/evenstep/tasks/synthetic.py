"""Made-up regression data of any size: each sample follows from its number, so nothing is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric

from evenstep.errors import UserError
from evenstep.order import hashing
from evenstep.tasks.task import Task, full_precision

TEACHER = 32  # units of the function to be learnt
HELD_OUT = 10_000  # samples for validation and for test, at most
GRID = 1 << 20  # two numbers of 20 bits behind the point make one of 40; 13 are left before it


@dataclass(frozen=True, kw_only=True)
class Synthetic(Task):
    """Learn a fixed smooth function of `features` numbers."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 3,
        "global_batch": 256,
        "optimizer": "adam",
        "lr": 1e-3,
    }

    size: int = 100_000
    features: int = 32
    hidden: int = 256
    layers: int = 2

    def __post_init__(self) -> None:
        for name in ("size", "features", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} of synthetic must be at least 1, not {getattr(self, name)}")
        if self.layers < 0:
            raise UserError(f"layers of synthetic must be at least 0, not {self.layers}")

    def data(self, split: str) -> "Made":
        size = self.size if split == "train" else min(self.size, HELD_OUT)
        return Made(size, self.features, hashing.key("synthetic", split))

    def model(self) -> nn.Module:
        widths = [self.features] + [self.hidden] * self.layers
        hidden = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(widths[-1], 1))

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        predicted, target = self.predict(model, batch)
        return F.mse_loss(predicted, target.to(predicted.dtype), reduction="none")

    def metrics(self) -> Mapping[str, Metric]:
        return {"mean_absolute_error": MeanAbsoluteError()}

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return full_precision(model(batch["x"])).squeeze(1), batch["y"]


@dataclass(frozen=True)
class Made:
    """Samples made when they are asked for."""

    by_rows: ClassVar[bool] = True

    size: int
    features: int
    key: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {name: column[0] for name, column in self.gather(np.array([index], dtype=np.int64)).items()}

    def gather(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """These samples: `features` numbers each, and what the teacher makes of them."""
        rows = hashing.mix(indices.astype(np.uint64) + np.uint64(self.key))
        x = _numbers(rows[:, None] ^ self._columns)
        inner, outer = self._teacher
        y = _on_grid(np.tanh(_on_grid(x) @ inner)) @ outer
        return {"x": torch.from_numpy(x), "y": torch.from_numpy(y.astype(np.float32))}

    @cached_property
    def _columns(self) -> hashing.Words:
        return np.array(hashing.stream(hashing.key("synthetic columns"), self.features), dtype=np.uint64)

    @cached_property
    def _teacher(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same function for every split, of about unit variance."""
        words = hashing.stream(hashing.key("synthetic teacher"), (self.features + 1) * TEACHER)
        weights = _numbers(np.array(words, dtype=np.uint64)).reshape(self.features + 1, TEACHER)
        return _on_grid(weights[:-1] / np.sqrt(self.features)), _on_grid(weights[-1] * 2 / np.sqrt(TEACHER))


def _on_grid(x: NDArray[Any]) -> NDArray[np.float64]:
    """Rounded so that sums of products are exact: else a sample would depend on the batch it is made in."""
    return np.rint(x.astype(np.float64) * GRID) / GRID


def _numbers(words: hashing.Words) -> NDArray[np.float32]:
    """Numbers evenly spread with mean 0 and variance 1."""
    unit = (hashing.mix(words) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return (unit - np.float32(0.5)) * np.float32(np.sqrt(12))
