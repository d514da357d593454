"""What a person sees while a run goes on: a line per epoch, and on a terminal a bar that moves."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from evenstep.records.audit import Audit

REDRAW = 0.2  # seconds: faster than that nobody reads, and drawing takes time from the training


class Output(Console):
    """Where all is said; that its reader has left is for the command to answer."""

    def on_broken_pipe(self) -> None:
        """Pass it on; rich would end the program as if it had failed."""
        raise


class Screen:
    """Rank 0's view of the run; quiet but for a line per epoch where the output is no terminal."""

    def __init__(self, console: Output, steps: int, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self._drawn = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("step {task.completed:,.0f}/{task.total:,.0f}  {task.fields[said]}"),
                TimeRemainingColumn(),
                console=console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("epoch 1", total=steps, said="")
            self._bar.start()

    def moved(self, epoch: int, step: int, loss: float, rate: float) -> None:
        """So far has the training come."""
        if self._bar is None or time.monotonic() - self._drawn < REDRAW:
            return
        self._drawn = time.monotonic()
        said = f"loss {number(loss)}  {rate:,.0f} samples/s"
        self._bar.update(self._task, description=f"epoch {epoch + 1}/{self.epochs}", completed=step, said=said)
        self._bar.refresh()

    def epoch(self, epoch: int, loss: float, rate: float, values: Mapping[str, Any], best: bool) -> None:
        """An epoch is done, and this is what validation says."""
        found = f"  validation: {in_words(values)}{' (best)' if best else ''}" if values else ""
        self.say(f"epoch {epoch + 1}/{self.epochs}  loss {number(loss)}  {rate:,.0f} samples/s{found}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def in_words(values: Mapping[str, Any]) -> str:
    """Measured values in a line; those that are tables are in the record."""
    plain = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {number(value)}" for name, value in plain.items())


def number(value: float) -> str:
    """Short enough to read at a glance."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def table(values: Mapping[str, Any]) -> None:
    """Measured values, a line each."""
    for name, value in values.items():
        say(f"{name:<20} {number(value) if isinstance(value, int | float) else value}")


def say(line: str) -> None:
    """A line as it is, however long."""
    Output().print(line, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def downloading(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for a download, on a terminal: give it the bytes that are here, and of how many."""
    columns = (TextColumn(f"fetching {name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Output(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def audited(found: Audit) -> None:
    """The finding of an audit, a line an epoch."""
    table = Table(
        "epoch", "steps", "samples once", "left out", "repeated", "lost", "undone by restarts", "digests"
    )
    for epoch in found.epochs:
        table.add_row(
            str(epoch.epoch + 1),
            f"{epoch.steps:,} of {epoch.of:,}",
            f"{epoch.once:,}",
            f"{epoch.left_out:,}",
            f"{epoch.repeated:,}",
            f"{epoch.lost:,}",
            f"{epoch.undone:,}",
            "DIFFER" if not epoch.proven else "agree" if epoch.proven == 1 else f"agree in {epoch.proven:.1%}",
        )
    Output().print(table)
    for line in found.odd:
        say(f"odd: {line}")
    verdict = "" if found.sound else ": NOT each sample exactly once, as far as the records tell"
    say(f"{found.repeated:,} repeated, {found.lost:,} lost{verdict}")
