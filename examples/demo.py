"""`make demo`: real data, two processes, and the promise: as many processes as you like, the same training."""

import os

from rich.console import Console
from rich.table import Table

from evenstep import train
from evenstep.tasks.digits import Digits


def main() -> None:
    """Train twice, on two processes and on one, and lay the loss curves over each other."""
    console = Console()
    console.print("[bold]Handwritten digits, DDP on 2 processes[/bold]")
    two = train(Digits(), procs=2, strategy="ddp", precision="fp64", runs=os.environ.get("RUNS", "runs"))
    console.print("[bold]The same on 1 process[/bold]")
    one = train(Digits(), procs=1, precision="fp64", runs=os.environ.get("RUNS", "runs"))

    table = Table(title="evenstep demo")
    for column in ("processes", "test accuracy", "samples/s", "seconds", "run"):
        table.add_column(column, no_wrap=True)
    for result in (two, one):
        record = result.record
        table.add_row(
            str(record["world"]["processes"]),
            f"{record['test']['accuracy']:.4f}",
            f"{record['samples_per_second']:,.0f}",
            f"{record['seconds']:.1f}",
            result.folder.name,
        )
    console.print(table)
    console.print(f"Both runs are kept in {two.folder.parent}/", soft_wrap=True)
    largest = max(abs(a - b) / abs(b) for a, b in zip(two.losses, one.losses, strict=True))
    console.print(
        f"Loss curves of 1 process and of 2 processes, {len(one.losses)} steps in float64: "
        f"largest relative difference [bold]{largest:.1e}[/bold]",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
