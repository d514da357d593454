"""A task small enough to be trained hundreds of times, with all that could make ranks differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric
from torchmetrics.classification import BinaryAveragePrecision

from evenstep import Columns, Draw, Task


@dataclass(frozen=True, kw_only=True)
class Tiny(Task):
    """Regression on a few numbers, with noise on the inputs keyed by sample."""

    size: int = 47
    norm: bool = False
    row_by_row: bool = False

    def data(self, split: str) -> Any:
        if split == "test":
            return None
        size = self.size if split == "train" else 13
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        columns = Columns(x=x, y=x.sin().sum(1))
        return RowByRow(columns) if self.row_by_row else columns

    def model(self) -> nn.Module:
        middle = nn.BatchNorm1d(8) if self.norm else nn.Identity()
        return nn.Sequential(nn.Linear(6, 8), middle, nn.Sequential(nn.Tanh(), nn.Linear(8, 5)), nn.Linear(5, 1))

    def prepare(self, batch: dict[str, Tensor], draw: Draw | None) -> dict[str, Tensor]:
        if draw is None:
            return batch
        noise = draw.uniform("noise").to(batch["x"].dtype)
        return {**batch, "x": batch["x"] + 0.1 * noise[:, None]}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")

    def metrics(self) -> Mapping[str, Metric]:
        return {"error": MeanAbsoluteError(), "precision": BinaryAveragePrecision()}

    def measure(self, metrics: Mapping[str, Metric], model: nn.Module, batch: dict[str, Tensor]) -> None:
        found = model(batch["x"]).squeeze(1)
        metrics["error"].update(found, batch["y"])
        metrics["precision"].update(found.sigmoid(), (batch["y"] > 0).long())


class RowByRow:
    """The same data without a way to gather a batch: it has to go through a DataLoader."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.columns[index]
