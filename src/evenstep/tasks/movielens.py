"""Ratings of movies (Harper and Konstan, 2015): what will a user think of a movie, and which do they like next?

Each user's last tenth of ratings is for test, the tenth before it for validation; the model is trained on what
came before both. A recommendation is put to the test with each held-out rating of four stars or more: all
movies that the user had not rated before that part are ranked, for the year in which the rating was given,
and the hit rate and the NDCG ask for the movie that was liked among the first ten.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric

from evenstep import world
from evenstep.errors import UserError
from evenstep.tasks import sources, tables
from evenstep.tasks.task import Columns, Draw, Task, full_precision

VERSION = 1
PARTS = ("train", "validation", "test")
HELD_OUT = 10  # a tenth for test, a tenth for validation
LIKED = 4.0
TOP = 10

YEARS = (1995, 2019)  # of rating
RELEASED = (1900, 2020)  # in steps of five years; 0 is for movies that do not say
MIDDLE = 3.5  # stars, where the model starts
OTHERS = 50  # movies that a liked one is compared with in training
CALM_TASTE, CALM_BIAS, CALM_CHOICE = 0.15, 0.02, 0.1  # how much each part of the model is held back


@dataclass(frozen=True, kw_only=True)
class MovieLens(Task):
    """Learn what 610 users rated, and foresee what they rate next."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 4,
        "global_batch": 512,
        "optimizer": "adam",
        "lr": 2e-2,
        "schedule": "cosine",
    }
    goal: ClassVar[str] = "min rmse"

    width: int = 32
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"width of movielens must be at least 1, not {self.width}")

    @cached_property
    def _table(self) -> tables.Table:
        home = self.data_dir or world.data_home()
        folder = sources.need("movielens", home)
        files = [folder / "ratings.csv", folder / "movies.csv"]
        return tables.table("movielens", VERSION, files, partial(parse, *files), home)

    @property
    def _users(self) -> int:
        return int(self._table["user"][-1]) + 1  # users stand in order

    @property
    def _movies(self) -> int:
        return len(self._table["genres"])

    def data(self, split: str) -> Columns:
        part = PARTS.index(split)
        here = self._table["part"] == part
        columns = {name: self._table[name][here] for name in ("user", "movie", "year", "rating")}
        if split == "train":
            return Columns(**columns)
        before = self._table["part"] < part
        seen = torch.zeros(self._users, self._movies, dtype=torch.bool)
        seen[self._table["user"][before], self._table["movie"][before]] = True
        return HeldOut(seen, columns)

    def model(self) -> nn.Module:
        return Recommender(self._users, self._table["genres"], self._table["released"], self.width)

    def prepare(self, batch: dict[str, Tensor], draw: Draw | None) -> dict[str, Tensor]:
        """For training, draw movies to compare each sample's with: any but its own, all equally likely."""
        if draw is None:
            return batch
        others = torch.stack([draw.integers(f"other {n}", 0, self._movies - 1) for n in range(OTHERS)], dim=1)
        return {**batch, "others": others + (others >= batch["movie"].unsqueeze(1))}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The squared error of the stars; for a movie that was liked, the surprise that it was this one."""
        stars, own, scores, held_back = _ask(model, batch)
        surprise = scores.logsumexp(dim=1) - own
        return (stars - batch["rating"]).square() + surprise * (batch["rating"] >= LIKED) + held_back

    def metrics(self) -> Mapping[str, Metric]:
        return {
            "rmse": MeanSquaredError(squared=False),
            f"hit_rate_{TOP}": HitRate(TOP),
            f"ndcg_{TOP}": Ndcg(TOP),
        }

    def measure(self, metrics: Mapping[str, Metric], model: nn.Module, batch: dict[str, Tensor]) -> None:
        stars, own, scores, _ = _ask(model, batch)
        metrics["rmse"].update(stars.clamp(0.5, 5.0), batch["rating"].to(stars.dtype))
        unseen = scores.masked_fill(batch["seen"], -math.inf)
        places = (unseen >= own.unsqueeze(1)).sum(dim=1)  # the last place among equals
        for name in (f"hit_rate_{TOP}", f"ndcg_{TOP}"):
            metrics[name].update(places[batch["rating"] >= LIKED])


def _ask(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    answers = model(batch["user"], batch["movie"], batch["year"], batch.get("others"))
    return tuple(full_precision(answer) for answer in answers)


class HeldOut(Columns):
    """Ratings, each with the movies that its user had already rated before."""

    def __init__(self, seen: Tensor, columns: Mapping[str, NDArray[Any]]) -> None:
        super().__init__(**columns)
        self.seen = seen

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "seen": self.seen[sample["user"]]}

    def gather(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        batch = super().gather(indices)
        return {**batch, "seen": self.seen[batch["user"]]}


# The model


class Recommender(nn.Module):
    """Two heads: the stars a user gives a movie, and which movie they like in a year."""

    def __init__(self, users: int, genres: NDArray[np.float32], released: NDArray[np.int64], width: int) -> None:
        super().__init__()
        self.stars = Movies(genres, released, width)
        self.taste = _embedding(users, width)
        self.mildness = _embedding(users, 1, spread=0.0)
        self.choice = Movies(genres, released, width)
        self.interest = _embedding(users, width)
        self.times = _embedding(YEARS[1] - YEARS[0] + 1, width)

    def forward(self, user: Tensor, movie: Tensor, year: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
        """Stars; the movie's score, those it competes with (itself among them), and what holds the model back.

        The others are a sample of all movies, so their scores are raised to stand for as many. Without any,
        the movie competes with all there are.
        """
        taste, mildness = self.taste(user), self.mildness(user)
        stars = MIDDLE + (_with_one(taste) * self.stars()[movie]).sum(dim=1) + mildness.squeeze(1)
        wish = _with_one(self.interest(user) + self.times(year))
        movies = self.choice()
        if others is None:
            scores = wish @ movies.T
            own = scores[torch.arange(len(movie), device=movie.device), movie]
        else:
            compared = F.embedding(torch.cat([movie.unsqueeze(1), others], dim=1), movies)
            scores = torch.einsum("sw,scw->sc", wish, compared)
            own = scores[:, 0].clone()  # FSDP warns of what is a view
            stand_for = math.log((len(movies) - 1) / others.shape[1])
            scores = torch.cat([scores[:, :1], scores[:, 1:] + stand_for], dim=1)
        held_back = (
            CALM_TASTE * (_size(taste) + _size(self.stars.own(movie)))
            + CALM_BIAS * (_size(mildness) + _size(self.stars.own_bias(movie)))
            + CALM_CHOICE * (_size(self.interest(user)) + _size(self.choice.own(movie)))
        )
        return stars, own, scores, held_back


class Movies(nn.Module):
    """A vector and a bias for each movie: of its own, and what it shares with its genres and its time."""

    genres: Tensor
    released: Tensor

    def __init__(self, genres: NDArray[np.float32], released: NDArray[np.int64], width: int) -> None:
        super().__init__()
        self.own = _embedding(len(genres), width)
        self.own_bias = _embedding(len(genres), 1, spread=0.0)
        self.of_genre = _embedding(genres.shape[1], width + 1)
        self.of_time = _embedding(_period(RELEASED[1]) + 1, width + 1)
        self.register_buffer("genres", torch.tensor(genres), persistent=False)
        self.register_buffer("released", torch.tensor(released), persistent=False)

    def forward(self) -> Tensor:
        """For all movies: there are fewer than a batch compares."""
        own = torch.cat([self.own.weight, self.own_bias.weight], dim=1)
        movies: Tensor = own + self.genres @ self.of_genre.weight + self.of_time(self.released)
        return movies


def _embedding(count: int, width: int, spread: float = 0.1) -> nn.Embedding:
    made = nn.Embedding(count, width)
    nn.init.normal_(made.weight, std=spread)
    return made


def _with_one(vectors: Tensor) -> Tensor:
    """A 1 behind each vector, for the bias behind the one it is multiplied with."""
    return F.pad(vectors, (0, 1), value=1.0)


def _size(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=1)


# Ranking metrics: counts of places, so that the sum over ranks is exact


class Places(Metric):
    """How often the movie that was liked came in at each of the first places."""

    counts: Tensor
    asked: Tensor

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top
        self.add_state("counts", torch.zeros(top, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("asked", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, places: Tensor) -> None:
        """Take in a place for each question, 1 being the first."""
        first = places[(places >= 1) & (places <= self.top)]
        self.counts += torch.bincount(first - 1, minlength=self.top)
        self.asked += places.numel()


class HitRate(Places):
    """The share of questions answered within the first places."""

    def compute(self) -> Tensor:
        return self.counts.sum() / self.asked


class Ndcg(Places):
    """The mean of 1 / log2(1 + place) over all questions, 0 for those beyond the first places."""

    def compute(self) -> Tensor:
        gains = 1 / torch.log2(torch.arange(self.top, dtype=torch.float64) + 2)
        return (self.counts.cpu() * gains).sum() / self.asked.cpu()


# From the files to columns


def parse(ratings: Path, movies: Path) -> tables.Table:
    """Ratings in the order of users and time, each with its part; movies with their genres and their time."""
    with movies.open(encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file))
    of_movie = np.array([int(row["movieId"]) for row in listed])
    numbers = np.loadtxt(ratings, delimiter=",", skiprows=1)
    numbers = numbers[np.lexsort((numbers[:, 3], numbers[:, 0]))]  # stable: as in the file where times are equal
    user = np.unique(numbers[:, 0], return_inverse=True)[1].astype(np.int64)
    order = np.argsort(of_movie)
    year = 1970 + (numbers[:, 3] / (365.2425 * 24 * 3600)).astype(np.int64)
    return {
        "user": user,
        "movie": order[np.searchsorted(of_movie[order], numbers[:, 1])].astype(np.int64),
        "rating": numbers[:, 2].astype(np.float32),
        "year": np.clip(year, *YEARS) - YEARS[0],
        "part": part_of(user),
        "genres": _genres([row["genres"] for row in listed]),
        "released": np.array([_period(_released(row["title"])) for row in listed], dtype=np.int64),
    }


def part_of(user: NDArray[np.int64]) -> NDArray[np.int64]:
    """For ratings in the order of users and time: 0 for training, 1 for validation, 2 for the last tenth, test."""
    counts = np.bincount(user)
    held_out = counts // HELD_OUT
    left = np.cumsum(counts)[user] - np.arange(len(user))  # of the user's ratings, from this one on
    tested = left <= held_out[user]
    held = left <= 2 * held_out[user]
    return tested.astype(np.int64) + held


def _genres(listed: list[str]) -> NDArray[np.float32]:
    """A movie's share in each genre: they sum up to 1."""
    names = sorted({name for genres in listed for name in genres.split("|")})
    has = np.array([[name in genres.split("|") for name in names] for genres in listed], dtype=np.float32)
    shares: NDArray[np.float32] = has / has.sum(axis=1, keepdims=True)
    return shares


def _released(title: str) -> int | None:
    """The year in brackets at the end of a title."""
    found = re.search(r"\((\d{4})\)\s*$", title)
    return int(found[1]) if found else None


def _period(year: int | None) -> int:
    return 0 if year is None else 1 + (min(max(year, RELEASED[0]), RELEASED[1]) - RELEASED[0]) // 5
