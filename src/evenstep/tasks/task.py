"""What a user writes: data, a model, and one loss per sample. Everything else has a default."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric

from evenstep.order import hashing

Batch = Any  # what the data set gives: for Columns, a dict of tensors


class Task(ABC):
    """What to train, and on what.

    A task with options is a dataclass: its fields are what `--model` and `--set name=value` fill in.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options of `evenstep train` that suit this task, taken where the user gives none."""

    goal: ClassVar[str] = "min loss"
    """What "best" means on the validation data: `min` or `max`, and a metric's name or `loss`."""

    unused_parameters: ClassVar[bool] = False
    """Whether a step may leave some of the model's parameters out: DDP then has to look for them each time."""

    @abstractmethod
    def data(self, split: str) -> Any:
        """The samples for `train`, `validation` or `test`; None where there are none.

        Columns, or anything with `__len__` and `__getitem__` (or, faster, `__getitems__`).
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; its initial weights may draw from torch's generator, which is seeded."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per sample. The system averages."""

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics for validation and test, by name."""
        return {}

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Any, ...]:
        """What each metric's `update` is called with."""
        raise NotImplementedError(f"{type(self).__name__} has metrics, so it needs predict(model, batch)")

    def measure(self, metrics: Mapping[str, Metric], model: nn.Module, batch: Batch) -> None:
        """Take a batch into the metrics; override where they want different things."""
        arguments = self.predict(model, batch)
        for metric in metrics.values():
            metric.update(*arguments)

    def prepare(self, batch: Batch, draw: "Draw | None") -> Batch:
        """Work on a batch that is already on the device: normalise it, and augment it where there is a `draw`.

        `draw` is None in evaluation.
        """
        del draw
        return batch

    def optimizer(self, model: nn.Module, settings: "Optimizing") -> torch.optim.Optimizer | None:
        """An optimizer of the task's own; None for the one the options name."""
        del model, settings
        return None

    def units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        """The parts that FSDP shards and gathers by themselves; None for a choice by size."""
        del model
        return None


@dataclass(frozen=True, kw_only=True)
class Optimizing:
    """What the options say of the update."""

    optimizer: str
    lr: float
    weight_decay: float
    momentum: float


class Columns:
    """A data set as tensors with one row per sample: gathered by the batch, without a loop over samples.

    Takes tensors and NumPy arrays, memory-mapped ones included, which are then shared by all processes.
    """

    by_rows: ClassVar[bool] = True
    """What it gathers has a row per sample: batches that are gathered together can be taken apart again."""

    def __init__(self, **columns: Tensor | NDArray[Any]) -> None:
        if not columns:
            raise ValueError("a data set needs at least one column")
        self.columns = {name: _as_tensor(column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def gather(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The rows of these samples."""
        rows = torch.from_numpy(indices)
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}


def _as_tensor(column: Tensor | NDArray[Any]) -> Tensor:
    if isinstance(column, Tensor):
        return column
    with warnings.catch_warnings():  # of a read-only array; nobody writes into a data set's columns
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(column)


def full_precision(x: Tensor) -> Tensor:
    """At least float32: what a model computed in half precision, fit for a loss or a metric."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Draw:
    """Random numbers for augmentation, keyed by (seed, epoch, sample): never by rank, worker or batch."""

    def __init__(self, seed: int, epoch: int, indices: NDArray[np.int64], device: torch.device) -> None:
        self.device = device
        self._of = seed, epoch, indices

    @cached_property
    def _words(self) -> hashing.Words:
        """A word per sample; worked out for those only that draw."""
        seed, epoch, indices = self._of
        start = np.uint64(hashing.key("draw", seed, epoch))
        return hashing.mix(hashing.mix(indices.astype(np.uint64) + start) ^ start)

    def uniform(self, name: str) -> Tensor:
        """A number in [0, 1) per sample, its own for each name."""
        words = hashing.mix(self._words ^ np.uint64(hashing.key("draw", name)))
        return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)).to(self.device)

    def integers(self, name: str, low: int, high: int) -> Tensor:
        """An integer in [low, high) per sample, its own for each name."""
        words = hashing.mix(self._words ^ np.uint64(hashing.key("draw", name)))
        span = (words >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32)
        return torch.from_numpy(span.astype(np.int64) + low).to(self.device)
