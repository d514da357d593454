"""The card payments: what is in them, who may learn from what, and what the models make of them."""

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, confusion_matrix, roc_auc_score

from evenstep import world
from evenstep.errors import UserError
from evenstep.tasks import catalog, fraud
from evenstep.tasks.fraud import FEATURES, Fraud, parts
from evenstep.tasks.task import Columns

ROWS, FRAUDS = 284_807, 492


@pytest.fixture(scope="module")
def published() -> np.ndarray:
    path = world.data_home() / "creditcard.csv"
    assert path.is_file(), f"{path} is not there: tests on real data need EVENSTEP_DATA"
    return np.loadtxt(path, delimiter=",", skiprows=1, quotechar='"')


@pytest.fixture(scope="module")
def splits() -> dict[str, Columns]:
    return {split: Fraud().data(split) for split in ("train", "validation", "test")}


def test_every_payment_is_in_one_part(published: np.ndarray, splits: dict[str, Columns]) -> None:
    assert published.shape == (ROWS, FEATURES + 1)
    assert sum(len(part) for part in splits.values()) == ROWS
    labels = torch.cat([part.columns["fraud"] for part in splits.values()])
    assert labels.sum() == FRAUDS
    assert np.array_equal(labels.numpy(), published[:, FEATURES]), "the parts do not follow each other in time"
    assert len(splits["test"]) == ROWS // 5
    for name, part in splits.items():
        assert part.columns["fraud"].sum() > 30, f"hardly a fraud in {name}"


def test_time_divides_the_parts(published: np.ndarray) -> None:
    cut = parts(ROWS)
    for before, after in (("train", "validation"), ("validation", "test")):
        assert published[cut[before], 0].max() <= published[cut[after], 0].min()


def test_no_duplicate_row_is_in_two_parts(published: np.ndarray) -> None:
    assert ROWS - len(np.unique(published, axis=0)) == 1_081
    for part in (parts(ROWS)["validation"], parts(ROWS)["test"]):
        moment = published[published[:, 0] == published[part.start, 0]]  # duplicates are of the same moment
        before = np.searchsorted(published[:, 0], moment[0, 0])
        here, there = moment[: part.start - before], moment[part.start - before :]
        assert not {tuple(row) for row in here} & {tuple(row) for row in there}


def test_the_training_part_alone_standardises(published: np.ndarray, splits: dict[str, Columns]) -> None:
    known = published[parts(ROWS)["train"], :FEATURES]
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    for name, part in splits.items():
        raw = published[parts(ROWS)[name], :FEATURES]
        np.testing.assert_allclose(part.columns["features"], (raw - mean) / deviation, rtol=1e-6, atol=1e-6)
    train = splits["train"].columns["features"].double()
    assert train.mean(dim=0).abs().max() < 1e-6 and (train.std(dim=0) - 1).abs().max() < 1e-5
    later = splits["test"].columns["features"].double()
    assert later.mean(dim=0).abs().max() > 0.1, "the test part was standardised by itself"


@given(st.integers(20, 10**9))
def test_parts_follow_each_other(rows: int) -> None:
    cut = list(parts(rows).values())
    assert cut[0].start == 0 and cut[-1].stop == rows
    assert all(before.stop == after.start for before, after in pairwise(cut))
    assert all(part.start < part.stop for part in cut)


def test_what_comes_later_has_no_say(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(50, FEATURES + 1)).round(3)
    numbers[:, FEATURES] = np.arange(50) % 2
    text = [",".join(map(str, row[:-1])) + f',"{row[-1]:.0f}"' for row in numbers]
    found = []
    for factor in (1, 1000):
        changed = text[:35] + [line if factor == 1 else "9" + line.removeprefix("-") for line in text[35:]]
        (tmp_path / "table.csv").write_text("\n".join(["header", *changed]))
        found.append(fraud.parse(tmp_path / "table.csv"))
    assert np.array_equal(found[0]["features"][:35], found[1]["features"][:35])
    assert not np.array_equal(found[0]["features"][35:], found[1]["features"][35:])


@pytest.mark.parametrize("name", Fraud.models)
def test_models_give_a_loss_and_a_probability_per_sample(splits: dict[str, Columns], name: str) -> None:
    task = Fraud(model_name=name)
    model = task.model()
    batch = splits["test"].gather(np.arange(7))
    losses = task.losses(model, batch)
    assert losses.shape == (7,) and losses.dtype == torch.float32 and (losses > 0).all()
    probabilities, labels = task.predict(model, batch)
    assert ((probabilities > 0) & (probabilities < 1)).all() and labels.tolist() == [0] * 7
    np.testing.assert_allclose(losses.detach(), -torch.log1p(-probabilities.detach()), rtol=1e-5)


def test_ff_is_the_one_that_was_asked_for() -> None:
    widths = [tuple(p.shape) for p in Fraud().model().parameters() if p.ndim == 2]
    assert widths == [(200, 30), (200, 200), (1, 200)]


def test_metrics_are_exact() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random(500) < 0.1).astype(np.int64)
    scores = np.clip(rng.random(500) * 0.6 + labels * 0.3, 0, 1).astype(np.float32)
    metrics = Fraud().metrics()
    for part in torch.arange(500).split(130):
        for metric in metrics.values():
            metric.update(torch.from_numpy(scores)[part], torch.from_numpy(labels)[part])
    found = {name: metric.compute() for name, metric in metrics.items()}
    assert found["average_precision"].item() == pytest.approx(average_precision_score(labels, scores), abs=1e-6)
    assert found["roc_auc"].item() == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    (_, false_alarms), (missed, hits) = confusion_matrix(labels, scores > 0.5).tolist()
    assert found["confusion_matrix"].tolist()[1] == [missed, hits]
    precision, recall = hits / (hits + false_alarms), hits / (hits + missed)
    assert found["precision"].item() == pytest.approx(precision)
    assert found["recall"].item() == pytest.approx(recall)
    assert found["f1"].item() == pytest.approx(2 * precision * recall / (precision + recall))


def test_the_goal_is_measured() -> None:
    assert Fraud.goal.split()[1] in Fraud().metrics()


def test_an_unknown_model_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError, match="no model fff for fraud; there are ff, cnn"):
        catalog.load("fraud", {"model_name": "fff"})


def test_the_folder_can_be_given(tmp_path: Path) -> None:
    task = catalog.load("fraud", {"data_dir": str(tmp_path)})
    with pytest.raises(UserError, match=f"{tmp_path}.*evenstep data get fraud"):
        task.data("train")


def test_columns_are_mapped_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fraud().data("test").gather(np.array([5, 3]))
