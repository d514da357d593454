"""A run that goes on is the run that was never disturbed: each sample once, each loss, each weight."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evenstep import api
from evenstep.api import Result
from evenstep.errors import UserError
from evenstep.files import RunFiles, locked
from evenstep.launch.blame import RankFailed
from evenstep.records.audit import audit
from evenstep.records.events import read_events
from evenstep.snapshots.shelf import name_of
from mortal import Mortal
from states import shelf_of

STEPS = 12  # in an epoch
OPTIONS = {"global_batch": 10, "epochs": 4, "lr": 0.01, "precision": "fp64", "max_restarts": 0}
SIZE = {"size": 10 * STEPS - 3}


@dataclass(frozen=True)
class Try:
    """A start of the training: on so many processes, with what else is said; it ends after so many steps."""

    ends: int | None = None
    procs: int = 1
    strategy: str | None = None


def train(folder: Path, tries: Sequence[Try], task: Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Train through all of these starts."""
    fate = folder / "fate"
    made = Mortal(fate=str(fate), **{**SIZE, **(task or {})})
    found: Path | None = None
    for one in tries:
        fate.unlink(missing_ok=True)
        if one.ends is not None:
            fate.write_text(f"{one.ends} raise")
        where = {"procs": one.procs, "strategy": one.strategy}
        try:
            if found is None:
                api.train(made, runs=str(folder / "runs"), **{**OPTIONS, **options, **where})
            else:
                api.resume(found, **where)
            assert one.ends is None, "it has to be disturbed"
        except (RuntimeError, RankFailed) as error:
            assert "its time has come" in str(error)
            assert one.ends is not None
        [found] = (folder / "runs").iterdir()
    assert found is not None
    return Result(found)


def weights(result: Result) -> dict[str, torch.Tensor]:
    return load_file(RunFiles(result.folder).weights("last"))


def resumed_at(result: Result) -> list[int]:
    """The steps that were done when it went on."""
    events = read_events(RunFiles(result.folder).events(0))
    return [event["number"] for event in events if event["name"] == "resumed"]


def each_sample_once(result: Result) -> None:
    found = audit(RunFiles(result.folder))
    assert found.sound, found
    assert all(epoch.steps == epoch.of for epoch in found.epochs)


def compare(found: Result, undisturbed: Result, close: float = 0.0) -> None:
    each_sample_once(found)
    assert len(found.losses) == len(undisturbed.losses) >= STEPS * OPTIONS["epochs"]
    tolerance = {"rtol": close, "atol": close}
    losses = [torch.tensor(result.losses, dtype=torch.float64) for result in (found, undisturbed)]
    torch.testing.assert_close(*losses, **tolerance, msg=lambda text: f"losses of each step: {text}")
    torch.testing.assert_close(weights(found), weights(undisturbed), **tolerance)
    for kept in ("final", "best", "best_epoch", "samples", "steps", "epochs"):
        assert found.record[kept] == (
            pytest.approx(undisturbed.record[kept], rel=1e-6) if close else undisturbed.record[kept]
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("undisturbed"), [Try()])


PLACES = {
    "twice within an epoch": ([Try(5), Try(4), Try()], [5, 9]),
    "at an epoch's very end": ([Try(STEPS), Try()], [STEPS]),
    "at the end of the first step": ([Try(1), Try()], [1]),
    "before the first step": ([Try(0), Try()], [0]),
    "in the second epoch, and in the one after it": ([Try(STEPS + 7), Try(STEPS + 2), Try()], [19, 33]),
    "in the last step": ([Try(4 * STEPS - 1), Try()], [47]),
    "in each epoch": ([Try(3), *[Try(STEPS)] * 3, Try()], [3, 15, 27, 39]),
}


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_was_broken_off(place: str, undisturbed: Result, tmp_path: Path) -> None:
    tries, places = PLACES[place]
    result = train(tmp_path, tries, snapshot_every=1)
    assert resumed_at(result) == places
    compare(result, undisturbed)


def test_what_came_after_the_snapshot_is_done_again(undisturbed: Result, tmp_path: Path) -> None:
    result = train(tmp_path, [Try(17), Try(1), Try()], snapshot_every=10)
    assert resumed_at(result) == [10, 10]
    compare(result, undisturbed)
    # the last steps of all, which nobody had noted yet, are not known to have been taken
    assert sum(epoch.undone for epoch in audit(RunFiles(result.folder)).epochs) > 0


DROPS = {"dropout": 0.3}


@pytest.mark.parametrize(
    ("strategy", "procs", "task", "options"),
    [
        ("one", 1, {"norm": True, **DROPS}, {"optimizer": "sgd", "schedule": "cosine", "warmup_steps": 5}),
        ("dp", 1, {"norm": True, **DROPS}, {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5}),
        ("one", 1, {"row_by_row": True, **DROPS}, {"policy": "blocks", "block_size": 7}),
        ("ddp", 2, {"norm": True, **DROPS}, {"policy": "shards"}),
        ("ddp", 3, {"row_by_row": True, **DROPS}, {"optimizer": "adamw", "schedule": "linear"}),
        ("fsdp", 2, {"norm": True, **DROPS}, {"optimizer": "sgd", "policy": "blocks", "deal": "random"}),
        ("fsdp", 3, DROPS, {"clip": 0.5, "policy": "sequential"}),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_on_as_many_processes_it_is_the_same_to_the_last_bit(
    strategy: str, procs: int, task: Mapping[str, Any], options: Mapping[str, Any], tmp_path: Path
) -> None:
    """With dropout, which draws on each rank for itself, and BatchNorm, which sees each rank's samples."""
    there = Try(procs=procs, strategy=strategy)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "one", [there], task, **options)
    disturbed = Try(STEPS + 7, procs, strategy)
    found = train(tmp_path / "other", [disturbed, there], task, snapshot_every=5, **options)
    assert resumed_at(found)[0] >= 10, "15, unless it was still being written"
    compare(found, expected)


@pytest.mark.parametrize(
    "tries",
    [
        [Try(17, 4, "ddp"), Try(9, 2, "ddp"), Try()],
        [Try(17), Try(9, 3, "fsdp"), Try(9, 2, "ddp"), Try(None, 4, "fsdp")],
    ],
    ids=["4, 2, 1", "1, 3, 2, 4"],
)
def test_on_another_number_of_processes_it_is_the_same_but_for_rounding(
    tries: Sequence[Try], undisturbed: Result, tmp_path: Path
) -> None:
    result = train(tmp_path, tries, snapshot_every=4)
    compare(result, undisturbed, close=1e-10)
    assert [
        event["world"] for event in read_events(RunFiles(result.folder).events(0)) if event["name"] == "started"
    ] == [one.procs for one in tries]


def test_the_global_batch_stays_and_accumulation_makes_up_for_it(tmp_path: Path) -> None:
    """Given as a batch per process at launch: 4 times 3 samples, and then 2 times 6, in micro-batches of 3."""
    options = {"global_batch": None, "batch_size": 3, "micro_batch": 3, "policy": "shards"}
    result = train(tmp_path, [Try(4, 4, "ddp"), Try(None, 2, "ddp")], snapshot_every=1, **options)
    assert result.record["plan"]["global_batch"] == 12
    assert result.record["plan"]["workers"] == 4
    for epoch in audit(RunFiles(result.folder)).epochs:
        assert epoch.sound and epoch.steps == epoch.of


# What is kept with it


def test_the_best_is_the_best_of_all_starts(tmp_path: Path) -> None:
    """The best epoch lies before the end of the first start: its weights are the ones that count in the end."""
    options = {"best": "max error"}
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "one", [Try()], **options)
    assert expected.record["best_epoch"] == 0, "the error falls"
    found = train(tmp_path / "other", [Try(30), Try(10), Try()], snapshot_every=5, **options)
    assert found.record["best_epoch"] == 0
    assert found.record["best"] == expected.record["best"]
    torch.testing.assert_close(load_file(found.best_weights), load_file(expected.best_weights), rtol=0, atol=0)


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_best_weights_that_are_lost_are_said_to_be(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path, [Try(30)], snapshot_every=5)
    path = first.best_weights
    path.unlink() if damage == "gone" else path.write_bytes(b"not weights")
    api.resume(first.folder, snapshot_every=1000)  # the fate is met by then
    assert "the best weights so far are lost" in capsys.readouterr().out
    assert first.record["state"] == "finished"
    assert first.record["best_epoch"] >= 2
    assert load_file(path)


def test_without_a_snapshot_it_begins_again_and_says_so(
    undisturbed: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, [Try(30), Try()], snapshot_every=1000)
    assert "there is no snapshot to go on from: the training begins again" in capsys.readouterr().out
    compare(result, undisturbed)


def test_which_were_passed_over_is_said_and_the_newest_good_one_is_taken(
    undisturbed: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(tmp_path, [Try(30)], snapshot_every=5)
    snapshots = RunFiles(result.folder).snapshots
    (snapshots / name_of(30) / "rank-0.bin").write_bytes(b"")
    (snapshots / name_of(25) / "manifest.json").unlink()
    capsys.readouterr()
    api.resume(result.folder)
    said = capsys.readouterr().out
    assert f"snapshot {name_of(30)} is passed over: rank-0.bin has 0 bytes instead of" in said
    assert f"snapshot {name_of(25)} is passed over: it was not finished" in said
    assert f"resumed from {name_of(20)}: epoch 2, after 8 of its steps" in said
    compare(result, undisturbed)


def test_a_snapshot_has_all_that_it_takes(tmp_path: Path) -> None:
    result = train(tmp_path, [Try(30)], snapshot_every=5)
    manifest = shelf_of(result.folder).manifest(name_of(30))
    assert manifest.progress["epoch"] == 2 and manifest.progress["step"] == 6
    assert manifest.progress["best_epoch"] == 1 and manifest.progress["best"].keys() >= {"loss", "error"}
    assert manifest.run["config"]["global_batch"] == 10
    assert manifest.run["plan"] == result.record["plan"]
    assert manifest.run["code"] == result.record["code"]
    assert {name.split(".")[0] for name in manifest.tensors} == {"model", "optimizer", "rank"}
    assert {name for name in manifest.tensors if ".random." in name} == {
        f"rank.0.random.{kind}" for kind in ("torch", "python", "numpy")
    }


# What cannot change


@pytest.mark.parametrize(
    "option", [{"global_batch": 20}, {"lr": 0.5, "epochs": 9}, {"seed": 1}, {"batch_size": 4}]
)
def test_what_decides_the_result_cannot_change(option: dict[str, Any], tmp_path: Path) -> None:
    result = train(tmp_path, [Try(5)], snapshot_every=1)
    with pytest.raises(UserError) as raised:
        api.resume(result.folder, **option)
    assert str(raised.value).startswith(f"{', '.join(sorted(option))} cannot change when a run goes on")
    assert result.record["state"] == "failed"


def test_data_that_has_changed_is_found_out(tmp_path: Path) -> None:
    result = train(tmp_path, [Try(5)], snapshot_every=1)
    config = RunFiles(result.folder).config
    config.write_text(config.read_text().replace(f"size: {SIZE['size']}", "size: 100"))
    before = shutil.copytree(result.folder, tmp_path / "before")
    with pytest.raises(UserError) as raised:
        api.resume(result.folder)
    assert f"size was {SIZE['size']} and is 100" in str(raised.value)
    assert sorted(path.name for path in (before / "snapshots").iterdir()) == shelf_of(result.folder).names()


def test_a_run_that_has_finished_or_still_runs_does_not_go_on(undisturbed: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has finished: there is nothing to go on with"):
        api.resume(undisturbed.folder)
    copy = shutil.copytree(undisturbed.folder, tmp_path / "copy")
    told = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**told, "state": "running"}))
    with locked(RunFiles(copy)), pytest.raises(UserError, match="is running"):
        api.resume(copy)


@pytest.mark.parametrize(
    ("best", "complaint"),
    [
        ("max nothing", "the goal names nothing, which is not measured; there are loss, error, precision"),
        ("error", "a goal is 'min' or 'max' and a metric's name"),
        ("most error", "a goal is 'min' or 'max'"),
    ],
)
def test_what_is_best_is_checked_before_the_first_step(best: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        train(tmp_path, [Try()], best=best)
    assert list((tmp_path / "runs").iterdir()) == []
