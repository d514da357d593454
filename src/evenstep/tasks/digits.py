"""Handwritten digits of 8 x 8 pixels, embedded in scikit-learn: real data without a download."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from evenstep.errors import unknown
from evenstep.order import hashing
from evenstep.order.permutation import Permutation
from evenstep.tasks.task import Columns, Draw, Task, full_precision

PARTS = {"test": (0, 360), "validation": (360, 540), "train": (540, 1797)}  # of one fixed shuffle


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Which digit is it?"""

    models: ClassVar = ("cnn", "mlp")
    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 25,
        "global_batch": 64,
        "optimizer": "adam",
        "lr": 2e-3,
        "schedule": "cosine",
    }
    goal: ClassVar[str] = "max accuracy"

    model_name: str = "cnn"

    def __post_init__(self) -> None:
        if self.model_name not in self.models:
            raise unknown("model", self.model_name, self.models, "digits")

    def data(self, split: str) -> Columns:
        from sklearn.datasets import load_digits

        found = load_digits()
        rows = Permutation(len(found.target), hashing.key("digits")).block(*PARTS[split])
        return Columns(image=found.images[rows].astype(np.float32), digit=found.target[rows].astype(np.int64))

    def model(self) -> nn.Module:
        if self.model_name == "mlp":
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
            )
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def prepare(self, batch: dict[str, Tensor], draw: Draw | None) -> dict[str, Tensor]:
        image = batch["image"].unsqueeze(1) / 8 - 1  # pixels are 0 to 16
        return {**batch, "image": image if draw is None else _shifted(image, draw)}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(full_precision(model(batch["image"])), batch["digit"], reduction="none")

    def metrics(self) -> Mapping[str, Metric]:
        return {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.argmax(model(batch["image"]), dim=1), batch["digit"]


def _shifted(image: Tensor, draw: Draw) -> Tensor:
    """Each image moved by up to a pixel in both directions."""
    side = image.shape[-1]
    padded = F.pad(image, (1, 1, 1, 1), value=-1.0)
    row, column = draw.integers("row", 0, 3), draw.integers("column", 0, 3)
    along = torch.arange(side, device=image.device)
    which = torch.arange(len(image), device=image.device)[:, None, None]
    shifted = padded[which, 0, (row[:, None] + along)[:, :, None], (column[:, None] + along)[:, None, :]]
    return shifted.unsqueeze(1)
