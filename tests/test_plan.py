"""The plan: who reads what, properties over sizes, batches, worlds, policies and epochs."""

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import UserError
from evenstep.order import plan as plan_module
from evenstep.order.plan import DEALS, POLICIES, Plan, Share, even

WORLDS = st.integers(1, 9)
EPOCHS = st.integers(0, 5)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    workers = draw(st.integers(1, 6))
    return Plan(
        size=draw(st.integers(1, 300)),
        global_batch=draw(st.integers(workers, 80)),
        seed=draw(st.integers(0, 3)),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        block_size=draw(st.integers(1, 40)),
        deal=draw(st.sampled_from(sorted(DEALS))),
        workers=workers,
    )


def shares(plan: Plan, epoch: int, world: int, step: int = 0) -> list[list[Share]]:
    """What the ranks compute from `step` on: a list of the ranks' shares for each step."""
    by_rank = [list(plan.shares(epoch, step, rank, world)) for rank in range(world)]
    return [list(of_step) for of_step in zip(*by_rank, strict=True)]


def counted(of_step: list[Share]) -> list[int]:
    """The samples of a step that count."""
    return [index for share in of_step if share.weighted for index in share.indices.tolist()]


# Every sample once, even steps, whatever the world


@given(plans(), EPOCHS, WORLDS)
def test_every_sample_is_in_one_step_of_one_rank(plan: Plan, epoch: int, world: int) -> None:
    read = [index for of_step in shares(plan, epoch, world) for index in counted(of_step)]
    assert sorted(read) == list(range(plan.size))


@given(plans(), EPOCHS, WORLDS)
def test_every_rank_takes_every_step(plan: Plan, epoch: int, world: int) -> None:
    for rank in range(world):
        assert len(list(plan.shares(epoch, 0, rank, world))) == plan.steps(epoch)


@given(plans(), EPOCHS, WORLDS)
def test_shares_tell_the_truth_about_themselves_and_their_step(plan: Plan, epoch: int, world: int) -> None:
    sizes = plan.sizes(epoch, 0, plan.steps(epoch))
    for step, of_step in enumerate(shares(plan, epoch, world)):
        total = sum(share.weighted for share in of_step)
        assert total == sizes[step] > 0
        assert total <= plan.global_batch
        for rank, share in enumerate(of_step):
            assert share.total == total
            assert share.weighted in (len(share.indices), 0) and len(share.indices) >= 1
            assert share.weighted or len(share.indices) == 1
            assert share.most == max(1, *(other.weighted for other in of_step))
            assert plan.weight(epoch, step, rank, world) == (share.weighted, share.total)
            # one that does not count keeps step on a sample of this step: no other data is touched
            assert set(share.indices.tolist()) <= set(counted(of_step))
    assert sum(sizes) == plan.size


@given(plans(), EPOCHS, WORLDS, WORLDS)
def test_a_step_has_the_same_samples_in_any_world(plan: Plan, epoch: int, one: int, other: int) -> None:
    for in_one, in_other in zip(shares(plan, epoch, one), shares(plan, epoch, other), strict=True):
        assert counted(in_one) == counted(in_other)


@given(plans(), EPOCHS, WORLDS)
def test_the_ranks_share_a_step_evenly(plan: Plan, epoch: int, world: int) -> None:
    for of_step in shares(plan, epoch, world):
        weighted = [share.weighted for share in of_step]
        if plan.lanes != world:  # otherwise each rank keeps to its own lane
            assert max(weighted) - min(weighted) <= 1


@given(st.integers(0, 1000), st.integers(1, 20))
def test_even_deals_all_and_never_takes_back(total: int, parts: int) -> None:
    dealt = [even(total, parts, part) for part in range(parts)]
    assert sum(dealt) == total and max(dealt) - min(dealt) <= 1
    assert all(even(total + 1, parts, part) - before in (0, 1) for part, before in enumerate(dealt))


# Resuming is arithmetic


@given(plans(), EPOCHS, WORLDS, st.data())
def test_going_on_from_any_step_gives_the_rest(plan: Plan, epoch: int, world: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, plan.steps(epoch)))
    rank = data.draw(st.integers(0, world - 1))
    whole = list(plan.shares(epoch, 0, rank, world))
    rest = list(plan.shares(epoch, step, rank, world))
    assert [as_values(share) for share in rest] == [as_values(share) for share in whole[step:]]
    if rest:
        assert as_values(plan.share(epoch, step, rank, world)) == as_values(rest[0])


@given(plans(), EPOCHS, st.lists(st.tuples(st.integers(1, 6), WORLDS), min_size=1, max_size=6))
def test_the_world_may_change_between_any_two_steps(plan: Plan, epoch: int, legs: list[tuple[int, int]]) -> None:
    """Through a chain of resumes in one epoch, each with another world (KempnerForge#57, titan#816)."""
    read: list[int] = []
    step = 0
    for steps, world in [*legs, (plan.size, 2)]:
        for of_step in islice(shares(plan, epoch, world, step), steps):
            read += counted(of_step)
            step += 1
    assert step == plan.steps(epoch)
    assert sorted(read) == list(range(plan.size))


@given(plans(), EPOCHS, WORLDS)
def test_windows_do_not_show(plan: Plan, epoch: int, world: int) -> None:
    """Shares are worked out many steps at a time, which must not change them."""
    whole = [as_values(share) for share in plan.shares(epoch, 0, world - 1, world)]
    one_by_one = [as_values(plan.share(epoch, step, world - 1, world)) for step in range(plan.steps(epoch))]
    assert whole == one_by_one


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 3])
def test_an_epoch_longer_than_a_window_is_whole(policy: str, world: int) -> None:
    plan = Plan(size=7 * plan_module.WINDOW + 17, global_batch=1000, policy=policy, workers=3, deal="random")
    read = [s.indices for rank in range(world) for s in plan.shares(2, 0, rank, world) if s.weighted]
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(plan.size))


def test_there_is_nothing_after_the_end() -> None:
    plan = Plan(size=10, global_batch=4)
    assert list(plan.shares(0, 3, 0, 1)) == []
    with pytest.raises(ValueError, match="steps 0 to 2, not 3"):
        plan.share(0, 3, 0, 1)


def as_values(share: Share) -> tuple[Any, ...]:
    return (share.indices.tolist(), *share[1:])


# Orders


@pytest.mark.parametrize("policy", ["shuffle", "shards", "blocks"])
@pytest.mark.parametrize("deal", DEALS)
def test_epochs_differ_and_come_again_without_being_told(policy: str, deal: str) -> None:
    """No set_epoch to forget (pytorch#31232), no epoch that has the order of another (AC#2016, AC#4233)."""

    def epoch(number: int, seed: int = 0) -> tuple[int, ...]:
        plan = Plan(size=200, global_batch=20, seed=seed, policy=policy, deal=deal, block_size=4, workers=2)
        return tuple(index for of_step in shares(plan, number, 2) for index in counted(of_step))

    orders = [epoch(number) for number in range(20)] + [epoch(number, seed=1) for number in range(20)]
    assert len(set(orders)) == 40
    assert orders[:20] == [epoch(number) for number in range(20)]


def test_sequential_is_the_stored_order_in_every_epoch() -> None:
    plan = Plan(size=11, global_batch=4, policy="sequential")
    for epoch in range(3):
        assert [counted(of_step) for of_step in shares(plan, epoch, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@given(st.integers(1, 300), st.integers(2, 6), EPOCHS)
def test_with_shards_each_rank_keeps_to_its_own_part(size: int, world: int, epoch: int) -> None:
    plan = Plan(size=size, global_batch=4 * world, policy="shards", workers=world)
    lengths = plan.lengths(epoch)
    assert lengths == [even(size, world, rank) for rank in range(world)]
    for rank in range(world):
        own = [i for share in plan.shares(epoch, 0, rank, world) if share.weighted for i in share.indices.tolist()]
        assert sorted(own) == list(range(sum(lengths[:rank]), sum(lengths[: rank + 1])))


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from(sorted(DEALS)), st.integers(2, 6), EPOCHS)
def test_blocks_stay_whole_and_lengths_are_what_workers_got(
    size: int, block_size: int, deal: str, world: int, epoch: int
) -> None:
    plan = Plan(
        size=size, global_batch=3 * world, policy="blocks", deal=deal, block_size=block_size, workers=world
    )
    owners: dict[int, int] = {}
    got = []
    for rank in range(world):
        own = [i for share in plan.shares(epoch, 0, rank, world) if share.weighted for i in share.indices.tolist()]
        got.append(len(own))
        blocks = [index // block_size for index in own]
        changes = [index for i, index in enumerate(own) if i == 0 or blocks[i] != blocks[i - 1]]
        assert all(index % block_size == 0 for index in changes), "a block is read from its start, in one go"
        for block in set(blocks):
            assert block not in owners, "a block belongs to one worker"
            owners[block] = rank
    assert got == plan.lengths(epoch)
    assert sum(got) == size


def test_dealing_at_random_is_uneven_but_fair() -> None:
    plan = Plan(size=100_000, global_batch=64, policy="blocks", deal="random", block_size=100, workers=4)
    lengths = np.array([plan.lengths(epoch) for epoch in range(200)])
    assert len({tuple(of_epoch) for of_epoch in lengths.tolist()}) > 190
    # 1,000 blocks, a quarter for each: binomial with a standard deviation of 13.7 blocks
    assert np.all(np.abs(lengths.mean(axis=0) - 25_000) < 4 * 1370 / np.sqrt(200))
    assert np.all(np.abs(lengths.std(axis=0) / 1370 - 1) < 0.25)


def test_more_blocks_than_hands_are_all_dealt() -> None:
    blocks = 3 * plan_module.HANDS + 1
    plan = Plan(size=blocks * 2 + 1, global_batch=64, policy="blocks", deal="random", block_size=2, workers=3)
    lengths = plan.lengths(0)
    assert sum(lengths) == plan.size
    assert all(abs(length / plan.size - 1 / 3) < 0.01 for length in lengths)


# Cases of others that went wrong


def test_10_samples_for_3_ranks_in_batches_of_2() -> None:
    """Unequal step counts in Megatron-Bridge#5944."""
    plan = Plan(size=10, global_batch=6)
    assert plan.steps(0) == 2 and plan.sizes(0, 0, 2) == [6, 4]
    assert [[share.weighted for share in of_step] for of_step in shares(plan, 0, 3)] == [[2, 2, 2], [1, 1, 2]]


def test_more_ranks_than_samples() -> None:
    """mmocr#1678."""
    plan = Plan(size=3, global_batch=16)
    (of_step,) = shares(plan, 0, 8)
    assert sorted(counted(of_step)) == [0, 1, 2]
    assert [share.weighted for share in of_step].count(0) == 5
    assert all(len(share.indices) == 1 for share in of_step)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_larger_than_the_data(policy: str) -> None:
    plan = Plan(size=5, global_batch=64, policy=policy, workers=3, block_size=2)
    for world in (1, 2, 3, 4):
        read = Counter(index for of_step in shares(plan, 0, world) for index in counted(of_step))
        assert read == Counter(range(5))


def test_the_trainer_that_was_seen_to_hang() -> None:
    """5,000 samples in blocks of 1,000 dealt at random to 2 workers, batch 64."""
    plan = Plan(size=5000, global_batch=128, policy="blocks", deal="random", block_size=1000, workers=2)
    seen = set()
    for epoch in range(20):
        lengths = plan.lengths(epoch)
        by_rank = [list(plan.shares(epoch, 0, rank, 2)) for rank in range(2)]
        assert len(by_rank[0]) == len(by_rank[1]) == plan.steps(epoch) == -(-max(lengths) // 64)
        assert [sum(share.weighted for share in of_rank) for of_rank in by_rank] == lengths
        seen.add(tuple(lengths))
    assert (0, 5000) in seen and len(seen) > 3, "among 20 epochs are those in which one worker gets it all"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "shuffled"}, "no policy shuffled; there are shuffle, sequential, shards, blocks"),
        ({"deal": "fair"}, "no way to deal blocks fair; there are round_robin, random"),
        ({"size": 0}, "the data set is empty"),
        ({"global_batch": 0}, "global_batch must be at least 1, not 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"policy": "shards", "workers": 9}, "take 9 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        Plan(**{"size": 100, "global_batch": 8, **options})
    assert "\n" not in str(refused.value)


# Any size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("size", [10**12, (1 << 63) - 1])
def test_huge_epochs_start_at_once(policy: str, deal: str, size: int) -> None:
    """In milliseconds: whatever looked at every block would run into the time limit here."""
    plan = Plan(size=size, global_batch=4096, policy=policy, deal=deal, block_size=1000, workers=4)
    assert sum(plan.lengths(5)) == size
    last = plan.steps(5) - 1
    for step in (0, last // 2, last):
        of_step = [plan.share(5, step, rank, 4) for rank in range(4)]
        read = counted(of_step)
        assert len(set(read)) == len(read) == of_step[0].total == plan.sizes(5, step, step + 1)[0]
        assert min(read) >= 0 and max(read) < size
