"""From indices to batches: nothing is lost between the plan and the model, however it is cut, read or moved."""

from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evenstep import Columns
from evenstep.batches import Batches, Subset, on_device
from evenstep.order.plan import DEALS, POLICIES, Plan
from tiny import RowByRow, Tiny

CPU = torch.device("cpu")


def numbered(size: int) -> Columns:
    """Samples that say which they are."""
    return Columns(x=torch.arange(size), y=torch.arange(size, dtype=torch.float64) / 7)


def batches(data: Any, plan: Plan, rank: int = 0, world: int = 1, **options: Any) -> Batches:
    return Batches(data, Tiny(), plan, rank=rank, world=world, device=CPU, **options)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    workers = draw(st.integers(1, 4))
    return Plan(
        size=draw(st.integers(1, 120)),
        global_batch=draw(st.integers(workers, 50)),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        deal=draw(st.sampled_from(sorted(DEALS))),
        block_size=draw(st.integers(1, 20)),
        workers=workers,
    )


class Seen(NamedTuple):
    """What a rank was handed in a step."""

    micros: list[tuple[list[int], bool]]
    pieces: int
    total: int
    digest: Any


def seen(source: Batches, epoch: int = 0, step: int = 0, steps: int | None = None) -> list[Seen]:
    found = []
    for taken in islice(source.epoch(epoch, step), steps):
        micros = []
        for batch, indices, counts in taken.micros:
            assert batch["x"].tolist() == indices.tolist(), "the batch is not that of its indices"
            micros.append((indices.tolist(), counts))
        found.append(Seen(micros, taken.pieces, taken.total, taken.digest))
    return found


# Micro-batches


@given(plans(), st.integers(1, 5), st.none() | st.integers(1, 20), st.integers(0, 2))
def test_micro_batches_make_up_the_step(plan: Plan, world: int, micro: int | None, epoch: int) -> None:
    data = numbered(plan.size)
    ranks = [seen(batches(data, plan, rank, world, micro_batch=micro), epoch) for rank in range(world)]
    for step, of_step in enumerate(zip(*ranks, strict=True)):
        shares = [plan.share(epoch, step, rank, world) for rank in range(world)]
        assert len({taken.pieces for taken in of_step}) == 1, "ranks that exchange gradients unequally often hang"
        for taken, share in zip(of_step, shares, strict=True):
            assert len(taken.micros) == taken.pieces
            counted = [index for indices, counts in taken.micros if counts for index in indices]
            assert counted == (share.indices.tolist() if share.weighted else [])
            assert all(indices for indices, _ in taken.micros), "a model cannot compute on nothing"
            assert all(len(indices) == 1 for indices, counts in taken.micros if not counts)
            assert micro is None or all(len(indices) <= micro for indices, _ in taken.micros)
            assert (taken.total, taken.digest) == (share.total, share.digest)
    read = Counter(i for rank in ranks for taken in rank for part, counts in taken.micros if counts for i in part)
    assert read == Counter(range(plan.size))


@given(plans(), st.integers(1, 3), st.none() | st.integers(1, 9), st.data())
def test_reading_row_by_row_gives_the_same(plan: Plan, world: int, micro: int | None, data: st.DataObject) -> None:
    samples = numbered(plan.size)
    rank = data.draw(st.integers(0, world - 1))
    step = data.draw(st.integers(0, plan.steps(1)))
    gathered = batches(samples, plan, rank, world, micro_batch=micro)
    loaded = batches(RowByRow(samples), plan, rank, world, micro_batch=micro)
    assert seen(loaded, 1, step) == seen(gathered, 1, step)


def test_a_step_that_is_not_computed_does_not_shift_the_next() -> None:
    """Whoever leaves micro-batches unread gets the next step's, not the rest of this one's."""
    plan = Plan(size=20, global_batch=6)
    loaded = batches(RowByRow(numbered(20)), plan, micro_batch=2)
    for step, taken in enumerate(loaded.epoch(0)):
        first = next(taken.micros)
        assert first.indices.tolist() == plan.share(0, step, 0, 1).indices.tolist()[: len(first.indices)]
        assert first.batch["x"].tolist() == first.indices.tolist()


# Loading processes


@pytest.fixture(scope="module")
def through_workers() -> Batches:
    """Loads through processes, which stay from epoch to epoch."""
    return batches(RowByRow(numbered(50)), Plan(size=50, global_batch=8), micro_batch=3, workers=2)


@pytest.mark.slow
def test_loading_processes_change_nothing() -> None:
    """Over epochs, from the middle of one, and after an epoch that was left early with batches on their way."""
    plan = Plan(size=50, global_batch=8)
    loaded = batches(RowByRow(numbered(50)), plan, 1, 2, micro_batch=3, workers=2)
    gathered = batches(numbered(50), plan, 1, 2, micro_batch=3)
    for epoch, step, steps in ((0, 0, None), (1, 2, None), (2, 0, 2), (3, 1, None)):
        assert seen(loaded, epoch, step, steps) == seen(gathered, epoch, step, steps)


# A part of the data


class Rows:
    """Sample by sample, or several at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(index)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        self.asked.append(len(indices))
        return [self[index] for index in indices]


def test_data_that_gives_several_samples_at_once_is_asked_for_them() -> None:
    data = Rows(20)
    plan = Plan(size=20, global_batch=8)
    assert len(seen(batches(data, plan))) == 3 and data.asked == [8, 8, 4]
    data.asked.clear()
    part = Subset(data, 10, seed=0)
    for taken in batches(part, Plan(size=10, global_batch=5)).epoch(0):
        list(taken.micros)
    assert data.asked == [5, 5], "and so is a part of it"


@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 5))
def test_a_part_is_chosen_by_the_seed_each_sample_once(size: int, wanted: int, seed: int) -> None:
    data = numbered(size)
    part = Subset(data, wanted, seed)
    assert len(part) == min(size, wanted)
    chosen = part.gather(np.arange(len(part)))["x"].tolist()
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(range(size))
    assert chosen == [int(part[index]["x"]) for index in range(len(part))]
    assert chosen == [int(Subset(RowByRow(data), wanted, seed)[index]["x"]) for index in range(len(part))]
    smaller = Subset(data, max(1, wanted // 2), seed)
    assert smaller.gather(np.arange(len(smaller)))["x"].tolist() == chosen[: len(smaller)], (
        "of more, the same first"
    )


def test_other_seeds_choose_others() -> None:
    chosen = {tuple(Subset(numbered(100), 20, seed).gather(np.arange(20))["x"].tolist()) for seed in range(10)}
    assert len(chosen) == 10


# On the device


class Pair(NamedTuple):
    """As collating makes them."""

    left: Any
    right: Any


def test_a_batch_of_any_make_comes_to_the_device_in_the_trainings_kind() -> None:
    numbers = torch.ones(2, dtype=torch.float64)
    batch = {
        "pair": Pair(numbers, [torch.ones(2, dtype=torch.uint8), ("name", None)]),
        "flag": torch.ones(2, dtype=torch.bool),
        "nested": {"whole": torch.arange(2), "half": torch.ones(2, dtype=torch.bfloat16)},
    }
    found = on_device(batch, CPU, torch.float32)
    assert type(found["pair"]) is Pair and found["pair"].left.dtype == torch.float32
    assert found["pair"].right[0].dtype == torch.uint8 and found["pair"].right[1] == ("name", None)
    assert found["flag"].dtype == torch.bool
    assert found["nested"]["whole"].dtype == torch.int64 and found["nested"]["half"].dtype == torch.float32
    assert on_device(numbers, CPU, torch.float64) is numbers, "what is there is not copied"
    assert on_device(numbers, torch.device("meta"), torch.float32).device.type == "meta"
