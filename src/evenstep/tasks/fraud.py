"""Card payments, few of them frauds (Machine Learning Group, ULB): which ones?"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
)

from evenstep import world
from evenstep.errors import unknown
from evenstep.tasks import sources, tables
from evenstep.tasks.task import Columns, Task, full_precision

FEATURES = 30  # Time, V1 to V28, Amount
TEST = 5  # the last fifth of the table, which is in the order of time
VALIDATION = 10  # the tenth before it; the frauds there are as scarce as in the test part
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Fraud(Task):
    """Is this payment a fraud? Learnt from the past, tested on the days that follow."""

    models: ClassVar = ("ff", "cnn")
    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 4,
        "global_batch": 256,
        "optimizer": "adam",
        "lr": 1e-3,
        "schedule": "cosine",
    }
    goal: ClassVar[str] = "max average_precision"

    model_name: str = "ff"
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.model_name not in self.models:
            raise unknown("model", self.model_name, self.models, "fraud")

    def data(self, split: str) -> Columns:
        home = self.data_dir or world.data_home()
        path = sources.need("fraud", home)
        table = tables.table("fraud", VERSION, [path], partial(parse, path), home)
        part = parts(len(table["fraud"]))[split]
        return Columns(features=table["features"][part], fraud=table["fraud"][part])

    def model(self) -> nn.Module:
        if self.model_name == "ff":
            return nn.Sequential(
                nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1)
            )
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv1d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Flatten(),
            nn.Linear(64 * FEATURES // 2, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = full_precision(model(batch["features"])).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch["fraud"].to(logits.dtype), reduction="none")

    def metrics(self) -> Mapping[str, Metric]:
        return {
            "average_precision": BinaryAveragePrecision(),
            "roc_auc": BinaryAUROC(),
            "precision": BinaryPrecision(),
            "recall": BinaryRecall(),
            "f1": BinaryF1Score(),
            "confusion_matrix": BinaryConfusionMatrix(),
        }

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return full_precision(model(batch["features"])).squeeze(1).sigmoid(), batch["fraud"].long()


def parts(rows: int) -> Mapping[str, slice]:
    """The rows of each part: what is tested comes after all that is learnt from."""
    test = rows - rows // TEST
    validation = test - rows // VALIDATION
    return {"train": slice(0, validation), "validation": slice(validation, test), "test": slice(test, rows)}


def parse(path: Path) -> tables.Table:
    """The features, standardised by the training part's mean and deviation, and the labels."""
    numbers = np.loadtxt(path, delimiter=",", skiprows=1, quotechar='"')
    features = numbers[:, :FEATURES]
    known = features[parts(len(features))["train"]]
    standardised = (features - known.mean(axis=0)) / known.std(axis=0)
    return {"features": standardised.astype(np.float32), "fraud": numbers[:, FEATURES].astype(np.uint8)}
