"""What it costs to start an epoch: evenstep's order against torch's DistributedSampler.

    python benchmarks/order.py --out order.json

Each case runs in a process of its own, as rank 0 of 2 ranks, after its imports and a warm-up on 1,000 samples.
Start: from the sampler to its first 256 indices. Memory: by how much the process grew at most meanwhile (Linux
counts it; by pages, so a few hundred KiB are noise). Indices/s: one pass over the epoch, start included, but
of at most 50 million indices. The rows of `Permutation` are the order alone, in blocks of 32,768: its memory
is what NumPy allocated for the first block of 256.

DistributedSampler makes a list of the whole permutation. Where its 48 bytes a sample would not fit into the
memory that is free, it is not run: what is shown then is computed from the largest size that was.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

import figures

SIZES = (10**6, 10**8, 10**9, 10**12)
AWKWARD = (1 << 40) + 1  # the sizes just above a power of two take the most rounds
NEEDED = 48  # bytes a sample: the tensor 8, the list 8, its integers 32
MOST = 50_000_000
CASES = ("DistributedSampler", "EvenSampler", "Permutation")
PACKAGES = ("torch", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: int(float(text)), nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case[0], int(args.case[1]))))
        return

    found: list[dict[str, Any]] = []
    for case in CASES:
        for size in [*args.sizes, AWKWARD] if case == "Permutation" else args.sizes:
            if case == "DistributedSampler" and size * NEEDED > 0.8 * psutil.virtual_memory().available:
                found.append({**computed(found, size), "case": case, "size": size})
            else:
                found.append({**best(case, size, args.rounds), "case": case, "size": size})
    show(found)
    figures.write(args.out, PACKAGES, cases=found, command=sys.argv)


def best(case: str, size: int, rounds: int) -> dict[str, Any]:
    """The best of some rounds: whatever else runs here can only make it slower."""
    if size * NEEDED > 10**9 and case == "DistributedSampler":
        rounds = 1
    runs = [in_a_process(case, size) for _ in range(rounds)]
    return {
        "start_s": min(run["start_s"] for run in runs),
        "memory_bytes": min(run["memory_bytes"] for run in runs),
        "indices_per_s": max(run["indices_per_s"] for run in runs),
        "computed": False,
    }


def in_a_process(case: str, size: int) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, str(size)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    run: dict[str, Any] = json.loads(done.stdout)
    return run


def computed(found: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """In proportion to the largest size that was run."""
    run = max((one for one in found if not one["computed"]), key=lambda one: one["size"])
    times = size / run["size"]
    return {
        "start_s": run["start_s"] * times,
        "memory_bytes": run["memory_bytes"] * times,
        "indices_per_s": run["indices_per_s"],
        "computed": True,
    }


# In the process of a case


def measured(case: str, size: int) -> dict[str, float]:
    """Start, memory and rate of one case."""
    return of_permutation(size) if case == "Permutation" else of_sampler(case, size)


def of_sampler(case: str, size: int) -> dict[str, float]:
    list(islice(epoch(case, 1000), 256))
    resident()  # from here on
    before = resident()
    began = time.perf_counter()
    indices = epoch(case, size)
    list(islice(indices, 256))
    start = time.perf_counter() - began
    grown = resident() - before
    passed = 256 + sum(1 for _ in islice(indices, MOST))
    return {"start_s": start, "memory_bytes": grown, "indices_per_s": passed / (time.perf_counter() - began)}


def epoch(case: str, size: int) -> Iterator[int]:
    """The indices of rank 0 of 2 in an epoch."""
    if case == "DistributedSampler":
        from torch.utils.data import DistributedSampler

        theirs: DistributedSampler[Any] = DistributedSampler(range(size), num_replicas=2, rank=0)  # type: ignore[arg-type]
        theirs.set_epoch(1)
        return iter(theirs)
    from evenstep import EvenSampler

    ours = EvenSampler(size, global_batch=512, rank=0, world=2)
    return (index for batch in ours for index in batch)


def resident() -> int:
    """The most memory that this process has had since the last time of asking, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def of_permutation(size: int) -> dict[str, float]:
    from evenstep.order.permutation import CHUNK, Permutation

    Permutation(1 << 20, 0).block(0, 256)
    tracemalloc.start()
    Permutation(size, 1).block(0, 256)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    began = time.perf_counter()
    Permutation(size, 2).block(0, 256)
    start = time.perf_counter() - began
    order = Permutation(size, 3)
    starts = range(0, min(size, MOST) - CHUNK, CHUNK)
    began = time.perf_counter()
    for first in starts:
        order.block(first, first + CHUNK)
    seconds = time.perf_counter() - began
    return {"start_s": start, "memory_bytes": memory, "indices_per_s": len(starts) * CHUNK / seconds}


# The table


def show(found: list[dict[str, Any]]) -> None:
    rows = []
    for one in found:
        mark = " (computed, not run)" if one["computed"] else ""
        rows.append(
            [
                f"{one['case']}, {named(one['size'])}{mark}",
                f"{one['start_s'] * 1e3:,.3f} ms" if one["start_s"] < 1 else f"{one['start_s']:,.1f} s",
                f"{one['memory_bytes'] / 1e6:,.2f} MB",
                "" if one["computed"] else f"{one['indices_per_s'] / 1e6:.1f} M/s",
            ]
        )
    figures.show(["", "start of an epoch", "memory", "indices"], rows)


def named(size: int) -> str:
    power = len(str(size)) - 1
    return f"10^{power}" if size == 10**power else "2^40 + 1" if size == AWKWARD else f"{size:,}"


if __name__ == "__main__":
    main()
