"""A snapshot holds all of its step, loads under any strategy and world, and is not believed when it is damaged."""

import dataclasses
import functools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evenstep.errors import UserError
from evenstep.progress import Progress
from evenstep.snapshots.shelf import Shelf, name_of
from evenstep.snapshots.storage import Blocks, Folder, Storage
from evenstep.world import World
from on_ranks import outcomes
from states import OPTIMIZERS, STEPS, Model, shelf_of, small

WRITERS = (("one", 1), ("dp", 1), ("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3))


def strategies_of(world: int) -> list[str]:
    return [name for name, size in WRITERS if size == world]


def same(found: Any, expected: Any, what: str, exactly: bool = False) -> None:
    close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **close, msg=lambda text: f"{what}: {text}")


# Written under any strategy and world, read under any other


def write_all(folder: Path, place: World) -> None:
    """A snapshot of each optimizer's state under each strategy, and what comes after it."""
    for name in strategies_of(place.size):
        for optimizer in OPTIMIZERS:
            training = small(name, place, optimizer=optimizer)
            training.steps(STEPS)
            run = folder / f"{name}-{place.size}-{optimizer}"
            saved = training.save(training.saver(shelf_of(run)))
            assert saved.error is None, saved.error
            whole = training.whole()
            after = {"losses": training.steps(2), "whole": training.whole()}
            if place.leads:
                torch.save({"then": whole, **after}, run / "expected")


def read_all(folder: Path, place: World) -> None:
    """Under each strategy of this world, all that any has written."""
    wrong = []
    for name in strategies_of(place.size):
        for run in sorted(folder.iterdir()):
            writer, world, optimizer = run.name.split("-")
            alike = (writer, int(world)) == (name, place.size)
            expected = torch.load(run / "expected")
            training = small(name, place, optimizer=optimizer, seed=9)
            found, said = training.resume(run)
            try:
                assert found is not None and not said
                same(training.whole(), expected["then"], "the state", exactly=True)
                same(training.steps(2), expected["losses"], "the next losses", exactly=alike)
                same(training.whole(), expected["whole"], "the state after them", exactly=alike)
            except AssertionError as error:
                wrong.append(f"{run.name} under {name} on {place.size}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for world in (1, 2, 3):
        failed = outcomes({"write": functools.partial(write_all, folder)}, world)
        assert not any(failed.values()), failed
    return folder


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_any_strategy_and_world_has_written_any_other_goes_on_from(world: int, written: Path) -> None:
    assert len(list(written.iterdir())) == len(WRITERS) * len(OPTIMIZERS)
    failed = outcomes({"read": functools.partial(read_all, written)}, world)
    assert not failed["read"], failed["read"]


# What a rank has for itself


def own_norms(place: World, folder: Path) -> None:
    """BatchNorms see their rank's samples; a snapshot has what each saw, and another world gets what all saw."""
    training = small("ddp", place, same_norms=False)
    training.steps(STEPS)
    mine = training.strategy.model[0].running_mean.clone()
    assert training.save(training.saver(shelf_of(folder))).error is None
    training.strategy.settle()
    settled = training.whole()
    if place.leads:
        torch.save(settled, folder / "settled")
    for name in ("ddp", "fsdp"):
        again = small(name, place, same_norms=False, seed=9)
        again.resume(folder)
        same(
            again.strategy.model[0].running_mean,
            mine,
            f"the mean that rank {place.rank} saw, {name}",
            exactly=True,
        )
        again.strategy.settle()
        same(again.whole()["0.running_mean"], settled["0.running_mean"], "what all saw", exactly=True)


def norms_of_others(place: World, folder: Path) -> None:
    for name in strategies_of(place.size):
        training = small(name, place, same_norms=False, seed=9)
        training.resume(folder)
        same(training.whole(), torch.load(folder / "settled"), f"{name} on {place.size}")


def test_what_batchnorms_saw_on_each_rank_is_kept(tmp_path: Path) -> None:
    assert not outcomes({"own": functools.partial(own_norms, folder=tmp_path)}, 2)["own"]
    for world in (1, 3):
        assert not outcomes({"others": functools.partial(norms_of_others, folder=tmp_path)}, world)["others"]


def drawn() -> list[Any]:
    """Numbers from every generator; the second of Python's and NumPy's normal ones was made with the first."""
    return [torch.rand(3).tolist(), random.gauss(), random.random(), np.random.normal(), np.random.rand()]


@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
def test_random_numbers_go_on_where_they_were(odd: bool, tmp_path: Path) -> None:
    training = small("one")
    training.steps(1)
    if odd:
        drawn()
    assert training.save(training.saver(shelf_of(tmp_path))).error is None
    expected = drawn()
    again = small("one", seed=9)
    again.resume(tmp_path)
    assert drawn() == expected


def test_the_scale_of_losses_is_the_same_over_all_ranks(tmp_path: Path) -> None:
    """In half precision losses are raised by the scale and by the world: a snapshot of two ranks, in one."""
    training = small("one", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7))
    training.steps(1)
    assert training.save(training.saver(shelf_of(tmp_path))).error is None
    manifest = shelf_of(tmp_path).manifest(name_of(1))
    for written_by, expected in ((1, 1024.0), (2, 2048.0)):
        again = small("one", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
        again.state._scale(dataclasses.replace(manifest, world=written_by))
        assert again.state.scaler.get_scale() == expected
        assert again.state.scaler.get_growth_interval() == 7


# What is saved is the state of its step


class Slow(Storage):
    """A folder whose writes wait until they may go on."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.address = folder.address
        self.may = threading.Event()

    def files(self) -> dict[str, int]:
        return self.folder.files()

    def read(self, path: str) -> Iterator[memoryview]:
        return self.folder.read(path)

    def write(self, path: str, blocks: Blocks) -> None:
        assert self.may.wait(30)
        self.folder.write(path, blocks)

    def remove(self, path: str) -> None:
        self.folder.remove(path)

    def within(self, folder: str) -> "Slow":
        raise NotImplementedError(folder)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_training_goes_on_while_its_state_is_written(optimizer: str, tmp_path: Path) -> None:
    """On CPU torch's own asynchronous save can write later values (pytorch#144657)."""
    training = small("one", optimizer=optimizer)
    training.steps(STEPS)
    then, slow = training.whole(), Slow(Folder(tmp_path / "snapshots"))
    saver = training.saver(Shelf(slow))
    saver.save(training.number, Progress(step=STEPS, number=STEPS).as_dict(), 0.0)
    training.steps(2)
    assert saver.busy
    assert all(not torch.equal(training.whole()[name], then[name]) for name in ("2.weight", "4.bias"))
    slow.may.set()
    saver.wait()
    assert saver.outcomes.pop().error is None
    again = small("one", optimizer=optimizer, seed=9)
    again.resume(tmp_path)
    same(again.whole(), then, "the state then", exactly=True)


def test_a_snapshot_takes_no_step_of_the_optimizer(tmp_path: Path) -> None:
    """torch's own look at an optimizer that holds nothing yet takes one, to have something to look at."""
    training = small("one")
    assert training.save(training.saver(shelf_of(tmp_path))).error is None
    assert not training.stepper.optimizer.state
    again = small("one", seed=9)
    again.resume(tmp_path)
    assert not again.stepper.optimizer.state
    assert again.steps(3) == training.steps(3)


class Either(nn.Module):
    """A model of which a step leaves a part out."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 1)
        self.unused = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_parameters_that_were_never_used_have_no_state_to_go_on_from(tmp_path: Path) -> None:
    training = small("one", model=Either)
    training.steps(STEPS)
    assert len(training.stepper.optimizer.state) == 2
    assert training.save(training.saver(shelf_of(tmp_path))).error is None
    again = small("one", model=Either, seed=9)
    again.resume(tmp_path)
    assert len(again.stepper.optimizer.state) == 2
    assert again.steps(2) == training.steps(2)


# Another model


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (Either, "it has no model.used.weight"),
        (lambda: nn.Sequential(Model(), nn.Identity()), "it has no model.0.0.weight"),
        (lambda: nn.Sequential(*Model(), nn.Linear(1, 1)), "it has no model.5.weight"),
        (
            lambda: nn.Sequential(*list(Model())[:-1], nn.Linear(5, 2)),
            "model.4.weight is float64 [1 x 5], not float64",
        ),
        (lambda: nn.Sequential(*list(Model())[:-1]), "it has 'model.4."),
    ],
    ids=["another", "deeper", "longer", "wider", "shorter"],
)
def test_the_snapshot_of_another_model_is_refused(model: Any, complaint: str, tmp_path: Path) -> None:
    training = small("one")
    training.steps(1)
    assert training.save(training.saver(shelf_of(tmp_path))).error is None
    other = small("one", model=model)
    before = other.whole()
    with pytest.raises(UserError) as raised:
        other.resume(tmp_path)
    assert "the snapshot is of another model" in str(raised.value)
    assert complaint in str(raised.value)
    same(other.whole(), before, "nothing is taken over", exactly=True)
