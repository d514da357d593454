"""Metrics over ranks are those of one process: each sample counts once, none is padded in."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics import Metric, wrappers
from torchmetrics import classification as of_classes

from evenstep import Columns, Task, metrics, strategies
from evenstep.batches import Batches
from evenstep.errors import UserError
from evenstep.evaluation import evaluate
from evenstep.order.plan import Plan
from evenstep.world import World, alone
from on_ranks import CPU, gathered, outcomes

IMAGES = 21

# by name: how it is made, and whether it takes a class instead of a number
KINDS: dict[str, tuple[Callable[[], Metric], bool]] = {
    "accuracy": (lambda: of_classes.BinaryAccuracy(), True),
    "average precision": (lambda: of_classes.BinaryAveragePrecision(), True),
    "average precision by bins": (lambda: of_classes.BinaryAveragePrecision(thresholds=7), True),
    "ROC AUC": (lambda: of_classes.BinaryAUROC(), True),
    "confusion matrix": (lambda: of_classes.BinaryConfusionMatrix(), True),
    "calibration": (lambda: of_classes.BinaryCalibrationError(), True),
    "squared error": (lambda: torchmetrics.MeanSquaredError(), False),
    "R2": (lambda: torchmetrics.R2Score(), False),
    "Pearson": (lambda: torchmetrics.PearsonCorrCoef(), False),
    "Spearman": (lambda: torchmetrics.SpearmanCorrCoef(), False),
    "explained variance": (lambda: torchmetrics.ExplainedVariance(), False),
    "two in one": (lambda: torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(), False),
}


def answers(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores between 0 and 1, classes, numbers."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.rand(size, generator=generator)
    scores = (numbers * 0.6 + torch.rand(size, generator=generator) * 0.4).clamp(0, 1)
    return scores, (numbers > 0.5).long(), numbers


def measured(size: int, ranks: int, rank: int, world: int) -> dict[str, Any]:
    """All metrics over so many samples, as one rank; `ranks` of them have samples, in batches of three."""
    scores, classes, numbers = answers(size)
    own = metrics.local({name: make() for name, (make, _) in KINDS.items()}, CPU)
    rows = torch.arange(size).tensor_split(ranks)[rank] if rank < ranks else torch.arange(0)
    for part in rows.split(3):
        for name, (_, of_class) in KINDS.items():
            if len(part):
                own[name].update(scores[part], (classes if of_class else numbers)[part])
    return metrics.merged(own, world)


# Over ranks


def metrics_are_those_of_one_process(place: World) -> None:
    found = measured(IMAGES, place.size, place.rank, place.size)
    torch.testing.assert_close(found, measured(IMAGES, 1, 0, 1), rtol=1e-5, atol=1e-7)


def all_ranks_have_the_very_same_values(place: World) -> None:
    """Or else they decide differently: early stopping by one rank alone (PL#379, PL#19045)."""
    values = gathered(measured(IMAGES, place.size, place.rank, place.size))
    assert all(other == values[0] for other in values)


def a_rank_may_have_no_samples(place: World) -> None:
    """Also the one that does the sums."""
    found = measured(IMAGES, 1, (place.rank + 1) % place.size, place.size)  # the last rank has them all
    torch.testing.assert_close(found, measured(IMAGES, 1, 0, 1), rtol=1e-6, atol=0.0)


def evaluation_counts_each_sample_once(place: World) -> None:
    """21 images, 22 merged (rf-detr#1507; pytorch#25162); batches averaged as if equal (AC#1674)."""
    for size in (IMAGES, 2, 1):
        for at_once in (1, 4, 50):
            task = Counting()
            batches = Batches(
                task.data("test", size),
                task,
                Plan(size=size, global_batch=at_once * place.size, policy="sequential"),
                rank=place.rank,
                world=place.size,
                device=CPU,
            )
            name = "ddp" if place.size > 1 else "one"
            values = evaluate(batches, task, strategies.make(name, task.model(), place, CPU), "fp32")
            numbers = np.arange(size)
            assert values["loss"] == pytest.approx(numbers.mean(), abs=1e-6)
            assert values["count"] == size and values["mean"] == pytest.approx(numbers.mean(), rel=1e-6)
            listed = values["numbers"] if size > 1 else [values["numbers"]]
            assert sorted(listed) == numbers.tolist()


class Counting(Task):
    """Its loss is the number of the sample."""

    def data(self, split: str, size: int = 0) -> Columns:
        del split
        return Columns(x=torch.arange(size, dtype=torch.float32).unsqueeze(1))

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).squeeze(1)

    def metrics(self) -> Mapping[str, Metric]:
        return {
            "count": torchmetrics.SumMetric(),
            "mean": torchmetrics.MeanMetric(),
            "numbers": torchmetrics.CatMetric(),
        }

    def measure(self, metrics: Mapping[str, Metric], model: nn.Module, batch: dict[str, Tensor]) -> None:
        del model
        for name, metric in metrics.items():
            metric.update(torch.ones_like(batch["x"]) if name == "count" else batch["x"].squeeze(1))


CHECKS = {
    check.__name__.replace("_", " "): check
    for check in (
        metrics_are_those_of_one_process,
        all_ranks_have_the_very_same_values,
        a_rank_may_have_no_samples,
        evaluation_counts_each_sample_once,
    )
}


@pytest.fixture(scope="module")
def found() -> Iterator[Callable[[int], dict[str, str]]]:
    """What the checks found in a world, once."""
    yield functools.cache(functools.partial(outcomes, CHECKS))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks(world: int, check: str, found: Callable[[int], dict[str, str]]) -> None:
    if outcome := found(world)[check]:
        pytest.fail(outcome, pytrace=False)


def test_alone() -> None:
    evaluation_counts_each_sample_once(alone())


# The mean of the losses


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9), min_size=1, max_size=9))
def test_a_mean_weighs_samples_not_batches(batches: list[list[float]]) -> None:
    mean = metrics.Mean()
    for batch in batches:
        mean.update(torch.tensor(batch, dtype=torch.float32))
    every = [number for batch in batches for number in batch]
    assert mean.compute().item() == pytest.approx(np.mean(every), rel=1e-12, abs=1e-9)


def test_many_small_losses_beside_a_large_one_are_not_lost() -> None:
    mean = metrics.Mean()
    mean.update(torch.full((1,), 1e8))
    for _ in range(100):
        mean.update(torch.full((1000,), 1e-3))
    assert mean.compute().item() == pytest.approx((1e8 + 100.0) / 100_001, rel=1e-12)


# What cannot be exact is refused


class Averaged(Metric):
    """Keeps a mean, which ranks with unequally many samples cannot average."""

    value: Tensor

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(value), dist_reduce_fx="mean")

    def update(self, x: Tensor) -> None:
        self.value = x.float().mean()

    def compute(self) -> Tensor:
        return self.value


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (3, "metric m is a int, not a torchmetrics.Metric; of a collection, give each metric a name of its own"),
        (torchmetrics.MetricCollection([torchmetrics.MeanMetric()]), "metric m is a MetricCollection, not a"),
        (torchmetrics.MeanMetric(sync_on_compute=False), "would speak of one rank's samples"),
        (
            wrappers.BootStrapper(torchmetrics.MeanMetric()),
            "metric m uses BootStrapper, whose value depends on",
        ),
        (
            wrappers.Running(torchmetrics.SumMetric(), window=2),
            "metric m uses Running, whose value depends on",
        ),
    ],
)
def test_a_metric_that_cannot_be_exact_is_refused(metric: Any, says: str) -> None:
    with pytest.raises(UserError) as caught:
        metrics.local({"m": metric}, CPU)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_mean_of_means_is_refused_where_the_ranks_differ() -> None:
    """Integer means floored by the reduction (PL#21838); batches averaged as if equal (AC#1674)."""
    metric = Averaged()
    with pytest.raises(UserError, match="Averaged takes the mean over ranks of its value, as if each had as many"):
        metrics._merge(metric, [{"value": torch.tensor(1)}, {"value": torch.tensor(2)}])
    metrics._merge(metric, [{"value": torch.tensor(7)}, {"value": torch.tensor(7)}])
    assert metric.value == 7


def test_measuring_leaves_the_tasks_metrics_alone() -> None:
    mine = torchmetrics.MeanMetric()
    mine.update(torch.tensor(5.0))
    own = metrics.local({"mean": mine}, CPU)
    own["mean"].update(torch.tensor(1.0))
    assert metrics.merged(own, 1) == {"mean": 1.0} and mine.compute() == 5.0


# Evaluation


class Watched(Counting):
    """Counts how often its model is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, bool]] = []

    def model(self) -> nn.Module:
        model = nn.Sequential(super().model(), nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5)))
        model[1].eval()  # put to rest by the user, for good
        model.register_forward_pre_hook(
            lambda _, x: self.asked.append((len(x[0]), model.training, x[0].requires_grad))
        )
        return model

    def measure(self, metrics: Mapping[str, Metric], model: nn.Module, batch: dict[str, Tensor]) -> None:
        super().measure(metrics, model, {"x": self.losses(model, batch).unsqueeze(1)})


def test_evaluation_asks_the_model_once_per_batch_and_leaves_it_as_it_was() -> None:
    task = Watched()
    strategy = strategies.make("one", task.model(), alone(), CPU)
    plan = Plan(size=10, global_batch=4, policy="sequential")
    batches = Batches(task.data("test", 10), task, plan, rank=0, world=1, device=CPU)
    before = {name: part.training for name, part in strategy.model.named_modules()}
    first = evaluate(batches, task, strategy, "fp32")
    assert evaluate(batches, task, strategy, "fp32") == first, "nothing is left over from the first time"
    assert task.asked == [(4, False, False), (4, False, False), (2, False, False)] * 2
    assert {name: part.training for name, part in strategy.model.named_modules()} == before
