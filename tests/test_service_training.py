"""A training through the order service: bit for bit the one without, whatever becomes of the server meanwhile."""

import signal
import time
from pathlib import Path

import pytest

from commands import Command, Ran, run, start
from evenstep.records.events import losses_of
from serving import Served, serving

TINY = f"{Path(__file__).parent / 'tiny.py'}:Tiny"
SIZE, BATCH, EPOCHS = 100_004, 512, 2  # parts of steps are asked for 64 or 128 at a time, once ahead
OPTIONS = (TINY, "--set", f"size={SIZE}", "--global-batch", str(BATCH), "--epochs", str(EPOCHS), "--seed", "5")

pytestmark = pytest.mark.slow


def opened(served: Served, name: str, world: int) -> tuple[str, ...]:
    """The option that lets a training read a new session."""
    served.open(name, size=SIZE, block=BATCH, seed=5, epochs=EPOCHS, world=world)
    return "--order", served.at(name)


def same(ran: Ran, other: Ran) -> None:
    """The losses of all steps, and the weights, to the last bit."""
    files, others = ran.one_run(), other.one_run()
    assert losses_of(files.events(0)) == losses_of(others.events(0))
    assert len(losses_of(files.events(0))) == EPOCHS * -(-SIZE // BATCH)
    assert files.weights("last").read_bytes() == others.weights("last").read_bytes()


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


def each_once(served: Served, name: str) -> None:
    found = [(epoch.once, epoch.repeated, epoch.lost, epoch.rows) for epoch in served.audit(name)]
    assert found == [(SIZE, 0, 0, 1)] * EPOCHS


def killed_and_started_again(served: Served, training: Command, ranks: int) -> None:
    """The server goes in the middle of the training's first epoch, and is away for a while."""
    training.until_trained(ranks)
    served.kill()
    time.sleep(1.0)
    assert training.ended() is None, "it was over before: this tried nothing"
    served.start()


def test_two_ranks_and_a_server_that_is_killed(tmp_path: Path) -> None:
    options = (*OPTIONS, "--procs", "2")
    without = run("train", *options, folder=folder(tmp_path, "without"))
    with serving(tmp_path) as served:
        through = start(*("train", *options, *opened(served, "two", 2)), folder=folder(tmp_path, "through"))
        killed_and_started_again(served, through, 2)
        ran = through.wait()
        assert ran.code == 0, ran.err
        same(ran, without)
        each_once(served, "two")
    assert run("audit", str(ran.runs[0]), folder=tmp_path).code == 0


def test_a_training_that_is_stopped_goes_on_with_its_session_on_other_ranks(tmp_path: Path) -> None:
    without = run("train", *OPTIONS, folder=folder(tmp_path, "without"))
    with serving(tmp_path) as served:
        order = opened(served, "resumed", 1)
        through = start("train", *OPTIONS, *order, folder=folder(tmp_path, "through"))
        files = through.until_trained()
        through.send(signal.SIGTERM)
        assert through.wait().code == 75, through.said()
        again = ("resume", str(files.folder), "--procs", "2")
        said = run(*again, folder=through.folder).complaint()
        assert "world 1 instead of 2" in said and "evenstep session open" in said
        served.open("resumed", size=SIZE, block=BATCH, seed=5, epochs=EPOCHS, world=2)
        ran = run(*again, folder=through.folder)
        assert ran.code == 0, ran.err
        assert losses_of(files.events(0)) == pytest.approx(losses_of(without.one_run().events(0)), rel=1e-4)
        each_once(served, "resumed")


def test_a_session_of_another_training_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.open("other", size=SIZE, block=BATCH, seed=6, epochs=1, world=1)
        ran = run("train", *OPTIONS, "--order", served.at("other"), folder=tmp_path)
        assert "it has seed 6 instead of 5, epochs 1 instead of 2" in ran.complaint()
        assert not ran.runs, "there is no run that has not begun"
        served.open("dynamic", size=SIZE, block=BATCH, seed=5, epochs=EPOCHS)
        ran = run("train", *OPTIONS, "--order", served.at("dynamic"), folder=tmp_path)
        assert "it has world 0 instead of 1" in ran.complaint()
