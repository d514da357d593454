"""Losses that are not finite, and want of memory: named by step, rank and samples; nothing bad is kept."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import Ran, run
from evenstep.files import RunFiles
from evenstep.order.plan import Plan
from evenstep.records import record
from evenstep.records.audit import audit
from evenstep.records.events import read_events

STUCK = Path(__file__).parent / "stuck.py"
SIZE, BATCH = 60, 12
BAD = 17  # the sample that is not finite


def train(folder: Path, *more: str, procs: int = 2, **settings: Any) -> Ran:
    happened = folder / "happened"
    happened.mkdir()
    words = ("--procs", str(procs), "--global-batch", str(BATCH), "--epochs", "3", "--snapshot-every", "1")
    return run("train", str(STUCK), *words, "--set", f"folder={happened}", *more, folder=folder, **settings)


def read_in(epoch: int) -> tuple[int, int, list[int]]:
    """The step in which two ranks read the bad sample, the rank that does, and all that it reads there."""
    plan = Plan(size=SIZE, global_batch=BATCH)
    for rank in range(2):
        for step, share in enumerate(plan.shares(epoch, 0, rank, 2)):
            if BAD in share.indices:
                return step, rank, share.indices.tolist()
    raise AssertionError


def kept(files: RunFiles) -> list[str]:
    """The snapshots there are."""
    return sorted(path.name for path in files.snapshots.glob("step-*"))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_is_named_to_the_sample(tmp_path: Path) -> None:
    ran = train(tmp_path, "--set", f"nan={BAD}")
    step, rank, samples = read_in(0)
    complaint = ran.complaint()
    assert complaint.startswith(f"the loss is not finite in step {step + 1} of epoch 1, on rank {rank} (")
    assert (
        f"in samples {', '.join(map(str, samples))}, of which sample {BAD} holds what is not finite" in complaint
    )
    assert complaint.endswith("or leave such steps out with --on-nan skip")
    files = ran.one_run()
    assert record.read(files)["state"] == "failed"
    assert all(int(name.removeprefix("step-")) <= step for name in kept(files)), "no snapshot from after it"
    assert not files.weights("best").exists() and not files.weights("last").exists()

    resumed = run("resume", str(files.folder), "--on-nan", "skip", folder=tmp_path)
    assert resumed.code == 0, resumed.err
    assert all(tensor.isfinite().all() for tensor in load_file(files.weights("last")).values())
    assert audit(files).sound


@pytest.mark.slow
def test_a_rank_whose_loss_goes_bad_by_itself_is_named(tmp_path: Path) -> None:
    """The data is finite, and only one rank's loss is not."""
    ran = train(tmp_path, "--set", "ways=nan", "--set", "at=7")
    complaint = ran.complaint()
    (share,) = [Plan(size=SIZE, global_batch=BATCH).share(1, 1, 1, 2)]
    assert complaint.startswith("the loss is not finite in step 2 of epoch 2, on rank 1 (")
    assert f"in samples {', '.join(map(str, share.indices))}; mend the data" in complaint


@pytest.mark.slow
def test_steps_that_are_left_out_are_counted_and_the_audit_shows_them(tmp_path: Path) -> None:
    """N ranks leave out what one process does, and come to the same weights."""
    found = {}
    for procs in (1, 2):
        folder = tmp_path / str(procs)
        folder.mkdir()
        options = (
            "--set",
            f"nan={BAD}",
            "--on-nan",
            "skip",
            "--sync-batchnorm",
            "--precision",
            "fp64",
            "--optimizer",
            "sgd",
        )
        ran = train(folder, *options, procs=procs)
        assert ran.code == 0, ran.err
        files = ran.one_run()
        told = record.read(files)
        assert (told["steps"], told["steps_left_out"], told["samples"]) == (15, 3, 3 * (SIZE - BATCH))
        audited = audit(files)
        assert [(epoch.once, epoch.left_out, epoch.repeated, epoch.lost) for epoch in audited.epochs] == [
            (SIZE - BATCH, BATCH, 0, 0)
        ] * 3
        assert audited.sound
        found[procs] = load_file(files.weights("last"))
        assert all(tensor.isfinite().all() for tensor in found[procs].values())
    torch.testing.assert_close(found[1], found[2], rtol=1e-9, atol=1e-12)
    events = [event for event in read_events(files.events(0)) if event["name"] == "left out"]
    plan, steps = Plan(size=SIZE, global_batch=BATCH), [read_in(epoch)[0] for epoch in range(3)]
    assert [(event["epoch"], event["step"], event["samples"]) for event in events] == [
        (epoch, step, {str(rank): plan.share(epoch, step, rank, 2).indices.tolist() for rank in range(2)})
        for epoch, step in enumerate(steps)
    ], "BatchNorm over all ranks spreads it to their losses"
    shown = run("audit", str(files.folder), folder=tmp_path)
    assert shown.code == 0 and "left out" in shown.out and "0 repeated, 0 lost" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("at", [7, 10], ids=["in an epoch", "in its last step"])
def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path, at: int) -> None:
    """A gradient spoils them, and the losses so far show nothing of it."""
    ran = train(tmp_path, "--set", "ways=gradient", "--set", "rank=0", "--set", f"at={at}", procs=1)
    said = f"evenstep: the weights are not finite any more after step {at - 5} of epoch 2; "
    assert ran.code == 2 and ran.err.startswith(said) and ran.err.count("\n") == 1
    files = ran.one_run()
    assert kept(files)[-1] == f"step-{at - 1:012d}"
    assert all(tensor.isfinite().all() for tensor in load_file(files.weights("best")).values())


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_is_named_with_its_step_and_samples(tmp_path: Path) -> None:
    ran = train(tmp_path, "--set", "ways=memory", "--set", "at=7", "--max-restarts", "0")
    share = Plan(size=SIZE, global_batch=BATCH).share(1, 1, 1, 2)
    pid = (tmp_path / "happened" / "0-memory").read_text()
    assert ran.code == 1
    last = ran.err.splitlines()[-1]
    assert re.match(
        rf"evenstep: rank 1 on \S+ \(pid {pid}\) failed with OutOfMemory: in step 2 of epoch 2, on ", last
    )
    assert f"samples {', '.join(map(str, share.indices))}: " in last and "can't allocate memory" in last
