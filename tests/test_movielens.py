"""The ratings: who may learn from what, how recommendations are measured, and what the model compares."""

import csv
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import world
from evenstep.errors import UserError
from evenstep.tasks import catalog
from evenstep.tasks.movielens import LIKED, OTHERS, TOP, HitRate, MovieLens, Ndcg, part_of
from evenstep.tasks.task import Columns, Draw

RATINGS, USERS, MOVIES = 100_836, 610, 9_742
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def published() -> dict[int, list[tuple[int, int, float]]]:
    """Each user's (time, movieId, rating), in the file's order."""
    path = world.data_home() / "ml-latest-small" / "ratings.csv"
    assert path.is_file(), f"{path} is not there: tests on real data need EVENSTEP_DATA"
    found = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found[int(row["userId"])].append((int(row["timestamp"]), int(row["movieId"]), float(row["rating"])))
    return found


@pytest.fixture(scope="module")
def splits() -> dict[str, Columns]:
    return {split: MovieLens().data(split) for split in ("train", "validation", "test")}


def test_the_last_tenth_of_each_user_is_for_test(published: dict, splits: dict[str, Columns]) -> None:
    assert len(published) == USERS and sum(map(len, published.values())) == RATINGS
    assert sum(map(len, splits.values())) == RATINGS
    stars = {split: defaultdict(list) for split in splits}
    for split, data in splits.items():
        for user, rating in zip(data.columns["user"].tolist(), data.columns["rating"].tolist(), strict=True):
            stars[split][user].append(rating)
    for number, user in enumerate(sorted(published)):
        in_time = [rating for _, _, rating in sorted(published[user], key=lambda seen: seen[0])]
        held = len(in_time) // 10
        assert stars["test"][number] == in_time[-held:], f"user {user}"
        assert stars["validation"][number] == in_time[-2 * held : -held], f"user {user}"
        assert stars["train"][number] == in_time[: -2 * held], f"user {user}"


def test_movies_keep_their_identity(published: dict, splits: dict[str, Columns]) -> None:
    with (world.data_home() / "ml-latest-small" / "movies.csv").open(encoding="utf-8", newline="") as file:
        listed = [int(row["movieId"]) for row in csv.DictReader(file)]
    assert len(listed) == MOVIES
    expected = {(number, movie, rating) for number, user in enumerate(sorted(published))
                for _, movie, rating in published[user]}  # fmt: skip
    found = {
        (user, listed[movie], rating)
        for data in splits.values()
        for user, movie, rating in zip(
            *(data.columns[c].tolist() for c in ("user", "movie", "rating")), strict=True
        )
    }
    assert found == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_parts_of_any_users(counts: list[int]) -> None:
    part = part_of(np.repeat(np.arange(len(counts)), counts))
    start = 0
    for count in counts:
        mine = part[start : start + count]
        assert (np.diff(mine) >= 0).all(), "later parts come later"
        assert (mine == 2).sum() == (mine == 1).sum() == count // 10
        start += count


def test_only_what_was_rated_before_is_seen(splits: dict[str, Columns]) -> None:
    rated = {name: set(zip(*(d.columns[c].tolist() for c in ("user", "movie")), strict=True))
             for name, d in splits.items()}  # fmt: skip
    for split, before in (("validation", rated["train"]), ("test", rated["train"] | rated["validation"])):
        data = splits[split]
        rows = np.arange(0, len(data), 97)
        batch = data.gather(rows)
        assert batch["seen"].shape == (len(rows), MOVIES)
        for n, row in enumerate(rows):
            user = int(batch["user"][n])
            assert {(user, m) for m in batch["seen"][n].nonzero().squeeze(1).tolist()} == {
                pair for pair in before if pair[0] == user
            }
            assert not batch["seen"][n, batch["movie"][n]], "the movie asked for must be among the unseen"
            assert torch.equal(data[int(row)]["seen"], batch["seen"][n])
    assert "seen" not in splits["train"].gather(np.arange(3))


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 12))
def test_hit_rate_and_ndcg_by_hand(places: list[int], cut: int) -> None:
    places = [place or 1 for place in places]
    hit_rate, ndcg = HitRate(TOP), Ndcg(TOP)
    for start in range(0, len(places), cut):
        for metric in (hit_rate, ndcg):
            metric.update(torch.tensor(places[start : start + cut], dtype=torch.int64))
    first = [place for place in places if place <= TOP]
    if not places:
        return
    assert hit_rate.compute().item() == pytest.approx(len(first) / len(places))
    assert ndcg.compute().item() == pytest.approx(sum(1 / math.log2(1 + p) for p in first) / len(places))


class Known(torch.nn.Module):
    """Answers with fixed scores."""

    def __init__(self, scores: torch.Tensor, stars: torch.Tensor) -> None:
        super().__init__()
        self.scores, self.stars = scores, stars

    def forward(self, user: torch.Tensor, movie: torch.Tensor, year: torch.Tensor, others: None) -> tuple:
        del user, year, others
        return self.stars, self.scores.gather(1, movie[:, None]).squeeze(1), self.scores, torch.zeros(len(movie))


def test_a_recommendation_is_measured_by_its_place_among_the_unseen() -> None:
    scores = torch.arange(20.0, 0.0, -1.0).expand(5, 20).clone()  # movie 0 first, movie 19 last
    scores[4] = 7.0  # this one cannot tell them apart
    seen = torch.zeros(5, 20, dtype=torch.bool)
    seen[1, :5] = True
    batch = {
        "user": torch.arange(5),
        "movie": torch.tensor([0, 12, 12, 3, 0]),
        "year": torch.zeros(5, dtype=torch.int64),
        "rating": torch.tensor([4.0, 5.0, 4.5, 3.5, 4.0]),
        "seen": seen,
    }
    task = MovieLens()
    metrics = task.metrics()
    task.measure(metrics, Known(scores, torch.tensor([4.0, 7.0, 4.5, -1.0, 3.0])), batch)
    # places: 1; 13 less the 5 seen = 8; 13; not liked, so not asked; 20, the last among equals
    assert metrics[f"hit_rate_{TOP}"].compute().item() == pytest.approx(2 / 4)
    assert metrics[f"ndcg_{TOP}"].compute().item() == pytest.approx((1 + 1 / math.log2(9)) / 4)
    # errors: 0, 0 (stars end at 5), 0, 3.0 (they begin at 0.5), 1
    assert metrics["rmse"].compute().item() == pytest.approx(math.sqrt((9 + 1) / 5))


def test_what_a_sample_is_compared_with_belongs_to_the_sample(splits: dict[str, Columns]) -> None:
    task = MovieLens()
    rows = np.random.default_rng(0).choice(len(splits["train"]), 300, replace=False)

    def others(rows: np.ndarray, epoch: int = 3) -> torch.Tensor:
        return task.prepare(splits["train"].gather(rows), Draw(1, epoch, rows, CPU))["others"]

    whole = others(rows)
    assert whole.shape == (300, OTHERS) and whole.min() >= 0 and whole.max() < MOVIES
    assert torch.equal(torch.cat([others(rows[:7]), others(rows[7:])]), whole), "they depend on the batch"
    assert not torch.equal(others(rows, epoch=4), whole)
    assert not (whole == splits["train"].gather(rows)["movie"][:, None]).any()
    spread = torch.bincount(whole.flatten() * 10 // MOVIES, minlength=10)
    assert spread.min() > 0.85 * whole.numel() / 10, f"some movies are drawn too seldom: {spread.tolist()}"


def test_the_sample_of_others_stands_for_all(splits: dict[str, Columns]) -> None:
    task = MovieLens()
    model = task.model()
    rows = np.arange(0, 40_000, 100)
    batch = splits["train"].gather(rows)
    drawn = task.prepare(batch, Draw(0, 0, rows, CPU))
    with torch.no_grad():
        exact, estimate = task.losses(model, batch), task.losses(model, drawn)
    liked = batch["rating"] >= LIKED
    assert torch.allclose(exact[~liked], estimate[~liked]), "what was not liked is not compared"
    assert (exact - estimate)[liked].abs().mean() < 0.05


def test_a_sample_has_its_loss_to_itself(splits: dict[str, Columns]) -> None:
    task = MovieLens()
    model = task.model()
    rows = np.arange(50, 90)
    drawn = task.prepare(splits["train"].gather(rows), Draw(0, 0, rows, CPU))
    together = task.losses(model, drawn)
    answers = model(*(drawn[name] for name in ("user", "movie", "year", "others")))
    assert not any(answer._is_view() for answer in answers), "FSDP warns of a model that returns a view"
    alone = torch.cat([task.losses(model, {name: c[n : n + 1] for name, c in drawn.items()}) for n in range(40)])
    assert together.shape == (40,)
    torch.testing.assert_close(together, alone)


def test_the_goal_is_measured() -> None:
    assert MovieLens.goal.split()[1] in MovieLens().metrics()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="width of movielens must be at least 1"):
        catalog.load("movielens", {"width": "0"})
    with pytest.raises(UserError, match="one model only"):
        catalog.load("movielens", {"model_name": "big"})
    with pytest.raises(UserError, match="evenstep data get movielens"):
        catalog.load("movielens", {"data_dir": str(tmp_path)}).data("train")
