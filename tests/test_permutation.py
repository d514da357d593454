"""The keyed bijection: it is one, it looks random, it never changes, and it costs nothing to start."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evenstep.order import hashing
from evenstep.order.permutation import CHUNK, EXACT, Bijection, Indices, Permutation

LARGE = [EXACT + 1, 10**5, 10**6, 1 << 20, (1 << 20) + 1, 10**9, 1 << 32, (1 << 32) + 1, 10**12, 1 << 63]


def order(size: int, number: int, stop: int | None = None) -> Indices:
    """The first members, up to `stop`, of the order that follows from a test's own key of that number."""
    return Permutation(size, hashing.key("test", number)).block(0, size if stop is None else stop)


# It is a permutation


def test_every_size_up_to_4096_is_permuted() -> None:
    for size in range(4097):
        for number in range(3 if size > 64 else 20):
            counts = np.bincount(order(size, number), minlength=size)
            assert counts.shape == (size,) and (counts == 1).all(), f"size {size}, key {number}"


def test_the_bijection_of_large_sizes_is_one_at_every_small_size_too() -> None:
    for size in range(1, 4097):
        members = Bijection(size, hashing.key("test", size)).walk(np.arange(size))
        counts = np.bincount(members, minlength=size)
        assert counts.shape == (size,) and (counts == 1).all(), f"size {size}"


@pytest.mark.parametrize("near", [EXACT, 1 << 17, 1 << 20])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_sizes_around_thresholds_are_permuted(near: int, off: int) -> None:
    members = order(near + off, 1)
    assert np.array_equal(np.sort(members), np.arange(near + off))


@pytest.mark.parametrize("size", [10**9, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 10**12, (1 << 62) + 1, 1 << 63])
def test_a_sample_of_a_huge_order_is_undone(size: int) -> None:
    apart = size // 20_000
    positions = np.unique(np.r_[np.arange(2000), np.arange(20_000) * apart, size - 1 - np.arange(2000)])
    permutation = Permutation(size, hashing.key("test", 5))
    members = permutation.at(positions)
    assert members.min() >= 0 and members.max() <= size - 1
    assert len(np.unique(members)) == len(positions), "two positions have the same member"
    assert np.array_equal(undone(permutation._bijection, members), positions)


def undone(bijection: Bijection, members: Indices) -> Indices:
    """The positions of members: the rounds taken backwards, with Python's own integers."""
    modulus, fold = int(bijection.mask) + 1, int(bijection.fold)
    inverses = [pow(int(factor), -1, modulus) for factor in reversed(bijection.factors)]

    def back(x: int) -> int:
        for inverse in inverses:
            x = (x ^ x >> fold) * inverse % modulus  # folding the high half, no wider, undoes itself
        return (x - int(bijection.start)) % modulus

    positions = []
    for member in members.tolist():
        position = back(member)
        while position > int(bijection.last):
            position = back(position)
        positions.append(position)
    return np.array(positions, dtype=np.int64)


@given(st.integers(1, 1 << 63), st.integers(0, (1 << 64) - 1), st.data())
def test_any_block_is_a_part_of_the_same_order(size: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + data.draw(st.integers(0, 300)))
    permutation = Permutation(size, key)
    block = permutation.block(start, stop)
    assert block.dtype == np.int64 and len(block) == stop - start
    assert len(set(block.tolist())) == len(block)
    assert all(0 <= member < size for member in block.tolist())
    one_by_one = [int(permutation.block(place, place + 1)[0]) for place in range(start, min(stop, start + 5))]
    assert block[:5].tolist() == one_by_one


def test_the_last_positions_of_the_largest_order_can_be_asked_for() -> None:
    assert len(Permutation(1 << 63, 3).block((1 << 63) - 10, 1 << 63)) == 10


@pytest.mark.parametrize("size", [-1, (1 << 63) + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        Permutation(size, 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 11), (4, 3)])
def test_positions_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        Permutation(10, 0).block(start, stop)


def test_a_long_block_is_the_same_as_its_chunks() -> None:
    permutation = Permutation(10**7, 9)
    whole = permutation.block(7, 7 + 3 * CHUNK)
    parts = [permutation.block(start, start + CHUNK) for start in range(7, 7 + 3 * CHUNK, CHUNK)]
    assert np.array_equal(whole, np.concatenate(parts))


# It looks random: with fixed keys, so that these tests give the same answer every time. Each statistic is
# worked out for many keys and must be spread evenly over [0, 1] as chance would have it: neither too uneven
# nor, which is as telling, too even.


def probability(counts: Indices, expected: float | None = None) -> float:
    """Where a chi-square statistic stands among those of chance, 0 to 1."""
    flat = np.ravel(counts).astype(np.float64)
    mean = flat.mean() if expected is None else expected
    return float(stats.chi2.cdf(((flat - mean) ** 2 / mean).sum(), flat.size - 1))


def spread_as_by_chance(values: list[float], what: str) -> None:
    found = stats.kstest(values, "uniform").pvalue
    assert found > 1e-4, f"{what}: chance would give these values once in {1 / max(found, 1e-300):.0f} times"


def buckets(members: Indices, size: int, number: int) -> Indices:
    """Which of `number` equal parts of [0, size) each member lies in."""
    return np.minimum((members / size * number).astype(np.int64), number - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_is_equally_likely(size: int) -> None:
    keys = 24_000
    orders: dict[tuple[int, ...], int] = {}
    for number in range(keys):
        found = tuple(np.argsort(hashing.stream(hashing.key("test", number), size)).tolist())
        orders[found] = orders.get(found, 0) + 1
    assert order(size, 0).tolist() == list(np.argsort(hashing.stream(hashing.key("test", 0), size)))
    possible = {2: 2, 3: 6, 4: 24, 5: 120}[size]
    assert len(orders) == possible
    assert 1e-4 < probability(np.array(list(orders.values()))) < 1 - 1e-4


@pytest.mark.parametrize("size", [10, 100, EXACT + 1, (1 << 20) + 1, 10**12])
def test_each_position_gets_each_member_over_many_keys(size: int) -> None:
    members = np.array([order(size, number, 4) for number in range(4000)])
    number = min(size, 20)
    parts = buckets(members, size, number)
    for position in range(4):
        uniform = probability(np.bincount(parts[:, position], minlength=number))
        assert 1e-4 < uniform < 1 - 1e-4, f"position {position}"


@pytest.mark.parametrize("size", LARGE)
def test_members_of_a_stretch_are_spread_over_all(size: int) -> None:
    stretch = size // 64 if size < 1 << 24 else 1 << 16
    high, low = [], []
    for number in range(60):
        members = order(size, number, stretch)
        # a stretch of 1/64 leaves out that share of the variance, which does not matter here
        high.append(probability(np.bincount(buckets(members, size, 16), minlength=16)))
        low.append(probability(np.bincount(members & 15, minlength=16)))
    spread_as_by_chance(high, "sixteenths of the range")
    spread_as_by_chance(low, "lowest bits")


@pytest.mark.parametrize("size", [EXACT, *LARGE])
@pytest.mark.parametrize("lag", [1, 2, 64, 1023])
def test_neighbours_have_nothing_to_do_with_each_other(size: int, lag: int) -> None:
    pairs, differences = [], []
    for number in range(40):
        # a large part of an order has nearly the exact share of everything: more even than chance
        members = order(size, number, min(size // 16, 1 << 15))
        parts = buckets(members, size, 8)
        pairs.append(probability(np.bincount(parts[:-lag] * 8 + parts[lag:], minlength=64)))
        # how far apart, counted round the circle; without the worry that size does not fit twice into 63 bits
        apart = (members[lag:] / size - members[:-lag] / size) % 1.0
        differences.append(probability(np.bincount(buckets(apart, 1, 64), minlength=64)))
    spread_as_by_chance(pairs, "pairs")
    spread_as_by_chance(differences, "differences")


@pytest.mark.parametrize("size", [1000, EXACT + 1, 10**6, 10**9, 10**12])
def test_no_serial_correlation(size: int) -> None:
    length = min(size, 1 << 15)
    scaled = []
    for number in range(40):
        members = order(size, number, length) / size - 0.5
        for lag in (1, 2, 3, 16, 512):
            correlation = 12 * float(np.mean(members[:-lag] * members[lag:]))
            scaled.append(correlation * np.sqrt(length - lag))
    assert np.abs(scaled).max() < 4.5, "one of 200 correlations is further from 0 than chance allows"
    assert abs(np.mean(scaled)) < 0.35 and 0.8 < np.std(scaled) < 1.2


@pytest.mark.parametrize("bits", [17, 18])
def test_differences_over_a_whole_order_do_not_repeat_too_often(bits: int) -> None:
    """The sharpest test known here: it finds weak keys with six rounds and most keys with four."""
    size = 1 << bits
    for number in range(25):
        members = order(size, number)
        for lag in (1, size // 2):  # half the size: positions that differ in the highest bit only
            apart = (members[lag:] - members[:-lag]) % size
            counts = np.bincount(apart, minlength=size).astype(np.float64)
            pairs = len(apart)
            repeats = ((counts**2).sum() - pairs - pairs**2 / size) / (pairs * np.sqrt(2 / size))
            assert abs(repeats) < 6, f"key {number}, lag {lag}: {repeats:.1f} standard deviations off"


@pytest.mark.parametrize("size", [1000, EXACT, EXACT + 1, 10**6, (1 << 32) + 1, 10**12])
@pytest.mark.parametrize("other", [1, 2, 1 << 20, 1 << 63, int(hashing.GOLDEN)])
def test_close_keys_give_unrelated_orders(size: int, other: int) -> None:
    length = min(size, 20_000)
    one = Permutation(size, 12345).block(0, length) / size
    two = Permutation(size, 12345 + other & (1 << 64) - 1).block(0, length) / size
    for shift in (-1, 0, 1):
        correlation = np.corrcoef(one[1:-1], np.roll(two, shift)[1:-1])[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(length), f"moved by {shift}: correlation {correlation:.3f}"
    table = np.bincount(buckets(one, 1, 8) * 8 + buckets(two, 1, 8), minlength=64)
    assert probability(table) < 1 - 1e-5


def test_keys_tell_their_parts_apart() -> None:
    keys = [hashing.key(*parts) for parts in [(1, 2), (12,), ("1", 2), (1, "2"), ("1 2",), (2, 1), (1, 2, 0)]]
    assert len(set(keys)) == len(keys)


# It never changes


GOLDEN_ORDERS = {
    10: [6, 2, 1, 7, 3, 5, 0, 8],
    1000: [14, 944, 738, 753, 990, 960, 824, 908],
    65_536: [60596, 45569, 37213, 45497, 56629, 37308, 57181, 36530],
    65_537: [38579, 53747, 29028, 11118, 33604, 26423, 36100, 32858],
    10**6: [858376, 580190, 416884, 470324, 383223, 296125, 621594, 686813],
    (1 << 32) + 1: [1602185842, 3419156825, 2419297263, 1040535119],
    10**12: [554446494458, 44916897219, 705890427331, 408585824703],
    1 << 63: [8187000433247552041, 3382105316990482563, 5132636291714634311, 6707122918353109267],
}


@pytest.mark.parametrize("size", GOLDEN_ORDERS)
def test_an_order_is_for_ever(size: int) -> None:
    """A change here would give every interrupted training another order in mid-epoch."""
    first = GOLDEN_ORDERS[size]
    assert Permutation(size, hashing.key("golden", 7, 3)).block(0, len(first)).tolist() == first


def test_hashes_are_for_ever() -> None:
    assert hashing.key("golden", 7, 3) == 14454170453132484075
    assert hashing.mix(np.arange(2, dtype=np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]
    assert hashing.stream(11, 2).tolist() == [10520313552068553934, 4919299050227587188]


# It costs nothing to start


@pytest.mark.parametrize("size", [10**12, (1 << 62) + 1])
def test_the_first_block_of_a_huge_order_takes_little_memory(size: int) -> None:
    tracemalloc.start()
    try:
        Permutation(size, 1).block(0, 256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000, f"{peak:,} bytes"


def test_the_order_is_there_without_torch() -> None:
    code = "import sys, evenstep.order.plan; print('torch' in sys.modules, 'scipy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"], "torch or scipy is loaded with evenstep.order.plan"
