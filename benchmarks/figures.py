"""What the benchmarks have in common: where they ran, their table, their JSON."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any


def rotated(names: Sequence[str], round_: int) -> list[str]:
    """The contenders of a round: each gets every place, and they go backwards in every other round."""
    turn = round_ % len(names)
    order = [*names[turn:], *names[:turn]]
    return order[::-1] if round_ % 2 else order


def ratios(rates: Mapping[str, Sequence[float]], name: str, against: str) -> list[float]:
    """How many times as fast in each round: what disturbs a round disturbs both."""
    return [rate / other for rate, other in zip(rates[name], rates[against], strict=True)]


def show(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, ["-" * width for width in widths], *rows):
        first, *rest = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]), flush=True)


def spread(values: Sequence[float], form: str) -> str:
    """The median, and between what the values lie."""
    low, middle, high = (format(value, form) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def write(path: Path | None, packages: Sequence[str], **figures: Any) -> None:
    """All that was measured, with where and on what."""
    if path is None:
        return
    facts = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[2],
        "packages": {name: metadata.version(name) for name in packages},
    }
    path.write_text(json.dumps({**facts, **figures}, indent=2) + "\n", encoding="utf-8")
