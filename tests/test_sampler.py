"""EvenSampler in a plain DataLoader, and in each framework for real: 2 processes, a crash, a resume."""

import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evenstep import EvenSampler, UserError
from evenstep.order.plan import POLICIES

EXAMPLES = Path(__file__).parent.parent / "examples"


def sampler(rank: int = 0, world: int = 1, size: int = 50, **options: Any) -> EvenSampler:
    return EvenSampler(size, **{"global_batch": 8, "rank": rank, "world": world, **options})


def taken(sampler: EvenSampler, steps: int | None = None) -> list[list[int]]:
    """The samples that count of so many batches, trained on by the book."""
    return [batch if sampler.take() else [] for batch in islice(sampler, steps)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# In a loop


@given(
    size=st.integers(1, 200),
    world=st.integers(1, 6),
    global_batch=st.integers(6, 60),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_all_ranks_get_as_many_batches_and_every_sample_once(
    size: int, world: int, global_batch: int, policy: str
) -> None:
    ranks = [
        EvenSampler(size, global_batch=global_batch, policy=policy, workers=3, rank=rank, world=world)
        for rank in range(world)
    ]
    for epoch in range(3):
        assert {rank.epoch for rank in ranks} == {epoch}
        batches = [taken(rank) for rank in ranks]
        assert {len(of_rank) for of_rank in batches} == {len(ranks[0])}
        assert sorted(flat(flat(batches))) == list(range(size))


def test_each_loop_is_the_next_epoch() -> None:
    """With take() and without, there is nothing to set (pytorch#31232)."""
    by_the_book, bare = sampler(), sampler()
    epochs = [flat(taken(by_the_book)) for _ in range(4)]
    assert [flat(list(bare)) for _ in range(4)] == epochs
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert bare.state_dict() == by_the_book.state_dict() == {"epoch": 4, "step": 0}


def test_a_loop_left_early_goes_on_where_the_training_stands() -> None:
    one = sampler()
    assert sorted(flat(taken(one, 3)) + flat(taken(one))) == list(range(50))
    assert one.state_dict() == {"epoch": 1, "step": 0}


def test_without_take_a_loop_left_early_was_an_epoch() -> None:
    one, whole = sampler(), sampler()
    first, second = list(islice(one, 3)), list(islice(one, 3))
    assert first == list(whole)[:3] and second == list(whole)[:3]


@settings(deadline=None)  # the first use of torch takes its time
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_the_factor_makes_the_mean_of_means_exact(size: int, global_batch: int, world: int) -> None:
    values = torch.linspace(-1, 2, size, dtype=torch.float64) ** 3
    ranks = [sampler(rank, world, size, global_batch=global_batch) for rank in range(world)]
    alone = sampler(0, 1, size, global_batch=global_batch)
    for *batches, whole in zip(*ranks, alone, strict=True):
        mean_over_ranks = sum(
            values[batch].mean() * rank.take() for batch, rank in zip(batches, ranks, strict=True)
        )
        torch.testing.assert_close(mean_over_ranks / world, values[whole].mean(), rtol=1e-12, atol=1e-12)
        assert alone.take() == 1.0


def test_take_is_for_batches_only() -> None:
    one = sampler()
    with pytest.raises(ValueError, match="once for each"):
        one.take()
    batches = iter(one)
    next(batches)
    one.take()
    with pytest.raises(ValueError, match="once for each"):
        one.take()


# The state


def reading_ahead(sampler: EvenSampler) -> DataLoader[int]:
    """Loads through two worker processes, which are batches ahead of the training."""
    return DataLoader(range(50), batch_sampler=sampler, num_workers=2, multiprocessing_context="forkserver")


def test_the_state_is_where_the_training_stands_not_the_workers() -> None:
    """64 samples, resumed at 20: 15 twice and 15 never (transgenic#59)."""
    first = sampler()
    read: list[int] = []
    for step, batch in enumerate(reading_ahead(first)):
        assert first.state_dict() == {"epoch": 0, "step": step}, "what the workers have read does not count"
        first.take()
        read += batch.tolist()
        if step == 2:
            break
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"epoch": 0, "step": 3}

    second = sampler()
    second.load_state_dict(state)
    for batch in reading_ahead(second):
        second.take()
        read += batch.tolist()
    assert sorted(read) == list(range(50))
    assert second.state_dict() == {"epoch": 1, "step": 0}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6))
def test_a_chain_of_resumes_with_any_worlds_loses_and_repeats_nothing(legs: list[tuple[int, int]]) -> None:
    """Resumed twice in an epoch, in a later epoch, at its end, with other ranks: in all, the same epochs."""
    state = {"epoch": 0, "step": 0}
    read: dict[int, list[int]] = {}
    for steps, world in legs:
        ranks = [sampler(rank, world) for rank in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        for _ in range(steps):
            epoch = ranks[0].epoch
            for rank in ranks:
                read.setdefault(epoch, []).extend(flat(taken(rank, 1)))
        assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1
        state = ranks[0].state_dict()
    straight = sampler()
    for epoch in range(state["epoch"] + 1):
        expected = flat(taken(straight, None if epoch < state["epoch"] else state["step"]))
        assert sorted(read.get(epoch, [])) == sorted(expected)


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="no step 7 in epoch 0, which has 7"):
        sampler().load_state_dict({"epoch": 0, "step": 7})


# Its place


def test_rank_and_world_belong_together() -> None:
    with pytest.raises(UserError, match="both rank and world"):
        EvenSampler(10, global_batch=2, rank=0)
    with pytest.raises(UserError, match="no rank 2 in a world of 2; ranks are 0 to 1"):
        sampler(2, 2)


def test_the_length_is_the_same_in_any_world() -> None:
    assert {len(sampler(0, world)) for world in range(1, 9)} == {7}


def refused(code: str) -> str:
    """What a framework says to a loader that it would deal out a second time."""
    start = (
        "import evenstep\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "loader = DataLoader(range(20), batch_sampler=evenstep.EvenSampler(20, global_batch=4, rank=0, world=2))\n"
    )
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 1, "the loader was dealt out twice without a word"
    return done.stderr


def test_accelerate_does_not_silently_deal_the_batches_out_again() -> None:
    said = refused(
        "from accelerate.data_loader import prepare_data_loader\n"
        "list(prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False))"
    )
    assert "keep its loader out of accelerator.prepare()" in said


def test_lightning_does_not_silently_deal_the_batches_out_again() -> None:
    said = refused(
        "from lightning.pytorch.utilities.data import _update_dataloader\n"
        "_update_dataloader(loader, DistributedSampler(range(20), num_replicas=2, rank=0))"
    )
    assert "Trainer(use_distributed_sampler=False)" in said


# The examples


def run(where: str, procs: int, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The lines that an example prints of the batches of all its ranks, and what it says besides."""
    script = EXAMPLES / f"{EXAMPLE[where]}_with_even_sampler.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}", script]
    with tempfile.TemporaryDirectory() as logs:  # torchrun leaves them
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": logs}
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, env=environment, timeout=250, check=False
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"epoch"')]
    return lines, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


EXAMPLE = {"bare DDP loop": "ddp_loop", "Accelerate": "accelerate", "Lightning": "lightning"}
RESUMED_BY = {"bare DDP loop": 3, "Accelerate": 2, "Lightning": 2}


@pytest.mark.parametrize("where", EXAMPLE)
def test_an_example_is_exactly_once_through_a_crash_in_its_second_epoch(where: str, tmp_path: Path) -> None:
    """321 samples in steps of 32 are 11 steps; the crash after 18 leaves the snapshot of step 15, epoch 1.

    A resume in a later epoch repeats the first one's order in AC#2016; the epoch after has it in AC#4233.
    """
    before, said = run(where, 2, f"--folder={tmp_path / 'run'}", "--crash-after=18")
    assert "stopped dead, as asked" in said, said
    after, said = run(where, RESUMED_BY[where], f"--folder={tmp_path / 'run'}")
    assert said.startswith("exit code 0"), said
    place = (1, 4)
    assert min((line["epoch"], line["step"]) for line in after) == place, "the resume is at the snapshot"
    assert max((line["epoch"], line["step"]) for line in before) == (1, 6)
    kept = [line for line in before if (line["epoch"], line["step"]) < place] + after

    straight = EvenSampler(321, global_batch=32, seed=7, rank=0, world=1)
    for epoch in range(3):
        for step, expected in enumerate(taken(straight)):
            of_step = [line for line in kept if (line["epoch"], line["step"]) == (epoch, step)]
            procs = 2 if (epoch, step) < place else RESUMED_BY[where]
            assert len(of_step) == procs, f"epoch {epoch}, step {step}: every rank takes it, once"
            found = flat([line["samples"] for line in of_step])
            assert sorted(found) == sorted(expected), f"epoch {epoch}, step {step}"
            assert sum(line["scale"] for line in of_step) == pytest.approx(
                sum(len(line["samples"]) * procs / len(expected) for line in of_step)
            )
    assert {line["epoch"] for line in kept} == {0, 1, 2}
