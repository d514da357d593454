"""When a training stops, what it calls the best, and that all ranks decide it alike."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep import loop, strategies
from evenstep.batches import Batches, Step
from evenstep.errors import UserError
from evenstep.files import RunFiles
from evenstep.loop import Score, Tally, Training, Wishes
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order.digest import Digest, of
from evenstep.order.plan import Plan
from evenstep.progress import Progress, Window
from evenstep.records.events import losses_of, read_events
from evenstep.records.recorder import Recorder
from evenstep.step import Stepper
from evenstep.tasks.task import Optimizing
from evenstep.world import World, alone
from on_ranks import CPU, gathered, outcomes
from tiny import Tiny

STEPS = 6  # in an epoch: 47 samples, 8 at a time


@contextlib.contextmanager
def training(files: RunFiles, place: World | None = None, **options: Any) -> Iterator[Training]:
    """A training of six steps an epoch, but for what the test is about."""
    task, place = Tiny(), place or alone()
    torch.manual_seed(0)
    strategy = strategies.make("ddp" if place.size > 1 else "one", task.model(), place, CPU)
    made = make_optimizer(
        strategy.model, Optimizing(optimizer="sgd", lr=0.01, weight_decay=0.0, momentum=0.0), CPU
    )
    plan = Plan(size=47, global_batch=8)
    recorder = Recorder(files, place, plan, session="s", steps=STEPS, epochs=1, log_every=1000)
    parts = Training(
        batches=Batches(
            task.data("train"),
            task,
            plan,
            rank=place.rank,
            world=place.size,
            device=CPU,
        ),
        stepper=Stepper(task, strategy, made, precision="fp32", clip=None, lr_factor=lambda _: 1.0),
        recorder=recorder,
        **{
            "validate": dict,
            "keep_best": lambda: None,
            "snapshot": lambda _: None,
            "snapshot_every": None,
            "wishes": Wishes,
            "score": Score("min loss", ["loss"]),
            "epochs": 3,
            "max_steps": None,
            "patience": None,
            **options,
        },
    )
    with contextlib.closing(recorder):
        yield parts


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return empty(tmp_path)


def empty(folder: Path) -> RunFiles:
    (folder / "events").mkdir(parents=True)
    return RunFiles(folder)


def trained(files: RunFiles, **options: Any) -> Progress:
    """How far a training comes."""
    progress = Progress()
    with training(files, **options) as parts:
        loop.train(parts, progress)
    return progress


# Early stopping and the best


def expected(values: list[float], goal: str, patience: int | None) -> tuple[int, list[int]]:
    """By the words of the options: epochs trained, and those that were the best so far."""
    sign = 1 if goal.startswith("max") else -1
    best, improved = -math.inf, []
    for epoch, value in enumerate(values):
        if epoch == 0 or sign * value > best:  # never where the value is NaN
            improved.append(epoch)
            best = -math.inf if math.isnan(value) else sign * value
        elif epoch - improved[-1] == patience:
            return epoch + 1, improved
    return len(values), improved


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=8),
    st.sampled_from(["min loss", "max score"]),
    st.none() | st.integers(1, 3),
)
def test_patience_and_the_best_epoch(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], goal: str, patience: int | None
) -> None:
    files = empty(tmp_path_factory.mktemp("run"))
    upcoming = iter(values)
    kept: list[int] = []
    progress = Progress()
    with training(
        files,
        validate=lambda: {goal.split()[1]: next(upcoming)},
        keep_best=lambda: kept.append(progress.epoch),
        score=Score(goal, [goal.split()[1]]),
        epochs=len(values),
        patience=patience,
    ) as parts:
        assert loop.train(parts, progress), "it came to its end"
    epochs, improved = expected(values, goal, patience)
    assert (progress.epoch + 1, kept, progress.best_epoch) == (epochs, improved, improved[-1])
    assert progress.number == epochs * STEPS


def test_without_validation_the_latest_is_the_best(files: RunFiles) -> None:
    kept: list[int] = []
    progress = trained(files, keep_best=lambda: kept.append(1), patience=1)
    assert progress.best_epoch == 2 and len(kept) == 3


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        ("loss", "a goal is 'min' or 'max' and a metric's name, such as 'min loss', not 'loss'"),
        ("least loss", "not 'least loss'"),
        ("max ", "not 'max '"),
        ("", "not ''"),
        ("max acuracy", "the goal names acuracy, which is not measured; there are loss, accuracy"),
        ("max table", "the goal names table, which is [[1, 2], [3, 4]], not a number to go by"),
    ],
)
def test_a_goal_that_cannot_be_is_refused(goal: str, says: str) -> None:
    values = {"loss": 1.0, "accuracy": 0.5, "table": [[1, 2], [3, 4]]}
    with pytest.raises(UserError) as caught:
        Score(goal, values.keys())(values)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@given(st.floats(), st.floats())
def test_a_score_is_more_where_the_model_is_better(one: float, other: float) -> None:
    for sign, goal in ((1, "max x"), (-1, "min x")):
        score = Score(goal, ["x"])
        assert (score({"x": one}) > score({"x": other})) == (
            sign * one > sign * other or (math.isnan(other) and not math.isnan(one) and sign * one > -math.inf)
        )


# Its length


@pytest.mark.parametrize(("most", "epochs"), [(1, 1), (5, 1), (6, 1), (7, 2), (12, 2), (17, 3), (18, 3), (100, 3)])
def test_max_steps_are_the_most_there_are(files: RunFiles, most: int, epochs: int) -> None:
    measured: list[int] = []
    progress = Progress()
    with training(files, max_steps=most, validate=lambda: measured.append(progress.number) or {}) as parts:
        assert loop.train(parts, progress)
    assert progress.number == min(most, 18) == len(losses_of(files.events(0)))
    assert progress.epoch + 1 == epochs == len(measured), "also the last, unfinished epoch is looked at"
    assert progress.samples == sum([8, 8, 8, 8, 8, 7][step % STEPS] for step in range(progress.number))


def test_the_losses_that_are_recorded_are_those_of_the_steps(files: RunFiles) -> None:
    """All of them, in order, however they were gathered, and the epoch's is the mean over its samples."""
    losses, totals = [], []
    with training(files) as parts:
        take = parts.stepper.take

        def taken(step: Step, number: int) -> torch.Tensor:
            total = take(step, number)
            losses.append(total.item() / step.total)
            totals.append(step.total)
            return total

        parts.stepper.take = taken  # type: ignore[method-assign]
        loop.train(parts, Progress())
    assert losses_of(files.events(0)) == pytest.approx(losses, rel=1e-12)
    of_epochs = [event["loss"] for event in read_events(files.events(0)) if event["name"] == "epoch"]
    for epoch, loss in enumerate(of_epochs):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        mean = sum(a * b for a, b in zip(losses[part], totals[part], strict=True)) / 47
        assert loss == pytest.approx(mean, rel=1e-12)


# Wishes


@pytest.mark.parametrize("looks", [1, 2, 5])
def test_a_wish_to_stop_is_granted_after_a_snapshot(files: RunFiles, looks: int) -> None:
    """At the next look, of which there is one in each epoch, however short it is; nothing is measured any more."""
    asked = itertools.count(1)
    snapshots: list[int] = []
    measured: list[int] = []
    progress = Progress()
    with training(
        files,
        wishes=lambda: Wishes(stop=next(asked) >= looks),
        snapshot=lambda progress: snapshots.append(progress.number),
        validate=lambda: measured.append(progress.number) or {},
        epochs=50,
    ) as parts:
        assert not loop.train(parts, progress)
    assert snapshots == [progress.number] and 0 < progress.number <= looks * STEPS
    assert measured == list(range(STEPS, progress.number, STEPS))
    assert len(losses_of(files.events(0))) == progress.number


def test_snapshots_come_every_so_many_steps(files: RunFiles) -> None:
    snapshots: list[tuple[int, int]] = []
    trained(files, snapshot=lambda p: snapshots.append((p.number, p.step)), snapshot_every=4)
    assert snapshots == [(4, 4), (8, 2), (12, 6), (16, 4)]


def test_a_training_goes_on_where_its_progress_is(files: RunFiles) -> None:
    """In mid-epoch, at an epoch's very end (verl#7401), and where it had come to its end."""
    for number in (4, 6, 12, 17, 18):
        snapshots: list[Progress] = []
        trained(
            files, snapshot=lambda p, kept=snapshots: kept.append(dataclasses.replace(p)), snapshot_every=number
        )
        (first, *_) = snapshots
        assert first.number == number
        with training(files) as parts:
            assert loop.train(parts, first)
        assert first.number == 18 and first.epoch == 2 and first.samples == 3 * 47


# Arithmetic between two looks


@given(st.lists(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 9)), min_size=1, max_size=30), max_size=6))
def test_a_tally_hands_over_each_step_once(looks: list[list[tuple[float, int]]]) -> None:
    tally = Tally(CPU, 1)
    tally.begin(3)
    progress = Progress()
    first = 3
    for look in looks:
        for number, (mean, total) in enumerate(look):
            tally.add(
                torch.tensor(mean * total, dtype=torch.float64), Step(iter(()), 1, total, Digest(total, number))
            )
        window, wishes = tally.take(Wishes(snapshot=True))
        assert wishes == Wishes(stop=False, snapshot=True)
        assert window.first == first and window.totals == [total for _, total in look]
        assert window.losses == pytest.approx([mean for mean, _ in look], rel=1e-12, abs=1e-12)
        assert window.digest == Digest(sum(window.totals), sum(range(len(look))))
        assert window.seconds >= 0
        progress.add(window)
        first += len(look)
    every = [(mean, total) for look in looks for mean, total in look]
    assert progress.samples == progress.epoch_samples == sum(total for _, total in every)
    assert progress.epoch_loss == pytest.approx(sum(mean * total for mean, total in every), rel=1e-9, abs=1e-9)


def test_looks_are_rare_where_steps_are_quick() -> None:
    """And never further apart than there is room for."""
    tally = Tally(CPU, 1)
    looks = []
    for step in range(5000):
        tally.add(torch.zeros(()), Step(iter(()), 1, 1, Digest()))
        if tally.full:
            looks.append(step)
            tally.take(Wishes())
    assert len(looks) < 50
    assert max(b - a for a, b in itertools.pairwise(looks)) <= loop.MOST


def test_a_window_of_no_time_has_a_rate() -> None:
    assert math.isfinite(Window(0, [1.0], [5], 0.0, of(torch.arange(5).numpy())).samples_per_second)


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 200),
    st.integers(0, 250),
    st.integers(0, 199),
)
def test_the_learning_rate_is_between_nothing_and_its_value(
    schedule: str, steps: int, warmup: int, step: int
) -> None:
    factors = [lr_factor(schedule, number, steps, warmup) for number in range(steps)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(b >= a for a, b in itertools.pairwise(factors[:warmup])), "it grows"
    assert all(b <= a for a, b in itertools.pairwise(factors[warmup:])), "and falls"
    assert factors[0] > 0, "the first step learns something"
    assert step >= steps or factors[step] == lr_factor(schedule, step, steps, warmup)


# On several ranks


def all_stop_at_the_same_step(folder: Path, place: World) -> None:
    """The one that wishes to is the last; the others hear of it at the next look."""
    values = itertools.count()
    snapshots: list[int] = []
    progress = Progress()
    with training(
        RunFiles(folder / "stop"),
        place,
        wishes=lambda: Wishes(stop=place.rank == place.size - 1 and next(values) >= 3),
        snapshot=lambda p: snapshots.append(p.number),
        epochs=10_000,
    ) as parts:
        assert not loop.train(parts, progress)
    stopped = gathered((progress.number, snapshots))
    assert all(of_rank == stopped[0] for of_rank in stopped) and stopped[0][1] == [progress.number]


def all_take_a_snapshot_where_one_wishes(folder: Path, place: World) -> None:
    calls = itertools.count()
    snapshots: list[int] = []
    with training(
        RunFiles(folder / "snapshot"),
        place,
        wishes=lambda: Wishes(snapshot=place.rank == 1 and next(calls) == 1),
        snapshot=lambda p: snapshots.append(p.number),
    ) as parts:
        assert loop.train(parts, Progress())
    found = gathered(snapshots)
    assert len(found[0]) == 1 and all(of_rank == found[0] for of_rank in found)


def all_see_the_same_losses_and_best_epoch(folder: Path, place: World) -> None:
    """Of all ranks' samples: rank 0's record is not rank 0's part."""
    progress = Progress()
    with training(RunFiles(folder / "losses"), place) as parts:
        loop.train(parts, progress)
    told = {**dataclasses.asdict(progress), "seconds": 0, "epoch_seconds": 0}
    assert all(other == told for other in gathered(told))
    assert progress.epoch_samples == 47
    lines = gathered(sorted(path.name for path in (folder / "losses").rglob("*") if path.is_file()))[0]
    assert lines == sorted(
        [*(f"rank-{rank}.jsonl" for rank in range(place.size)), *(n for n in lines if "tfevents" in n)]
    )


CHECKS = {
    check.__name__.replace("_", " "): check
    for check in (
        all_stop_at_the_same_step,
        all_take_a_snapshot_where_one_wishes,
        all_see_the_same_losses_and_best_epoch,
    )
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """What the checks found in a world, once."""

    @functools.cache
    def at(world: int) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(f"world-{world}")
        return outcomes({name: functools.partial(check, folder) for name, check in CHECKS.items()}, world)

    return at


@pytest.mark.parametrize("check", CHECKS)
def test_on_several_ranks(check: str, found: Callable[[int], dict[str, str]]) -> None:
    if outcome := found(3)[check]:
        pytest.fail(outcome, pytrace=False)
