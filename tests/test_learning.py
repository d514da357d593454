"""Real data, real learning: each task comes to the quality that is expected of it, by its own defaults."""

from pathlib import Path
from typing import Any

import pytest

from commands import Ran
from evenstep.api import Result

TRAIN_ONLY = str(Path(__file__).parents[1] / "benchmarks" / "vit_task.py")  # measuring takes longer than learning
LIMIT = 280.0  # seconds, on a machine that may be busy

pytestmark = pytest.mark.usefixtures("real_data")


def trained(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    return ran.record()


def test_fraud(evenstep: Any) -> None:
    line = ("train", "fraud", "--model", "ff", "--procs", "2", "--batch-size", "128", "--epochs", "4")
    found = trained(evenstep(*line, limit=LIMIT))["test"]
    assert found["average_precision"] >= 0.80
    (_, alarms), (missed, caught) = found["confusion_matrix"]
    assert found["recall"] == pytest.approx(caught / (caught + missed))
    assert found["precision"] == pytest.approx(caught / (caught + alarms))


def test_movielens(evenstep: Any) -> None:
    found = trained(evenstep("train", "movielens", "--procs", "2", limit=LIMIT))["test"]
    assert found["rmse"] <= 0.88
    assert found["hit_rate_10"] > 0.05
    assert found["ndcg_10"] > 0.02


def test_digits(evenstep: Any) -> None:
    assert trained(evenstep("train", "digits", "--procs", "2", limit=LIMIT))["test"]["accuracy"] >= 0.97


def test_cifar10(evenstep: Any) -> None:
    few = ("--sample", "256", "--global-batch", "32", "--epochs", "4")
    ran = evenstep("train", TRAIN_ONLY, "--model", "resnet18", "--precision", "bf16", *few, limit=LIMIT)
    trained(ran)
    losses = Result(ran.runs[0]).losses
    steps = len(losses) // 4
    assert sum(losses[-steps:]) / steps < sum(losses[:steps]) / steps - 0.2
