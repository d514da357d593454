"""What a step costs beside the arithmetic: evenstep against a bare DDP loop, Lightning and Accelerate.

    EVENSTEP_DATA=... python benchmarks/overhead.py --out overhead.json

All train the fraud task's `ff` model (30-200-200-1) on the same rows by DDP on CPU, one thread a process.
evenstep trains by its own command, with its records, curves and snapshots of weights; the others' loops are in
overhead_loops.py, and record nothing. Each runs in fresh processes, in every round, in changing order. Timed
are the epochs (evenstep's without validation, which the others do not have), the first one left out as
warm-up. Ratios are taken within a round, and their median over rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

import figures
from evenstep.files import RunFiles
from evenstep.records.events import read_events
from evenstep.tasks.fraud import Fraud

HERE = Path(__file__).parent
CONTENDERS = ("bare", "evenstep", "lightning", "accelerate")
TARGETS = {"bare": 1.15, "lightning": 1.3, "accelerate": 1.3}
SHOWN = {"bare": "bare DDP loop", "evenstep": "evenstep", "lightning": "Lightning", "accelerate": "Accelerate"}
PACKAGES = ("torch", "numpy", "lightning", "accelerate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4, help="of which the first is warm-up")
    parser.add_argument("--rows", type=int, default=len(Fraud().data("train")), help="of the training part")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    steps = -(-args.rows // (args.procs * args.batch_size))
    print(f"{args.rounds} rounds; {args.epochs} epochs of {steps} steps, {args.procs} processes")
    rates: dict[str, list[float]] = {name: [] for name in args.contenders}
    losses: dict[str, float] = {}
    for round_ in range(args.rounds):
        for name in figures.rotated(args.contenders, round_):
            with tempfile.TemporaryDirectory() as folder:
                seconds = train(name, Path(folder), args.procs, args.batch_size, args.rows, args.epochs)
                losses[name] = loss(Path(folder) / "weights.safetensors", args.rows)
            rates[name].append(steps * (args.epochs - 1) / sum(seconds[1:]))
        print(f"round {round_ + 1}: " + "  ".join(f"{name} {rates[name][-1]:.0f}" for name in rates), flush=True)
    report(rates, losses)
    figures.write(args.out, PACKAGES, steps_per_second=rates, loss_after=losses, command=sys.argv)


def train(name: str, folder: Path, procs: int, batch_size: int, rows: int, epochs: int) -> list[float]:
    """Train by one of them in processes of its own; the seconds of each epoch, and the weights in the folder."""
    if name == "evenstep":
        return evenstep(folder, procs, batch_size, rows, epochs)
    loop = [HERE / "overhead_loops.py", name, "--rows", rows, "--batch-size", batch_size, "--epochs", epochs]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", procs]
    run([sys.executable, *torchrun, *loop, "--folder", folder])
    found: list[float] = json.loads((folder / "seconds.json").read_text())
    return found


def evenstep(folder: Path, procs: int, batch_size: int, rows: int, epochs: int) -> list[float]:
    size = ["--sample", rows] if rows < len(Fraud().data("train")) else []
    command = [sys.executable, "-m", "evenstep", "train", "fraud", "--model", "ff", "--strategy", "ddp", *size]
    run([*command, "--procs", procs, "--batch-size", batch_size, "--epochs", epochs, "--runs", folder / "runs"])
    files = RunFiles(next((folder / "runs").iterdir()))
    files.weights("last").rename(folder / "weights.safetensors")
    return [
        rows / event["samples_per_second"] for event in read_events(files.events(0)) if event["name"] == "epoch"
    ]


def run(command: Sequence[object]) -> None:
    """Run a command to its end, silently unless it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def loss(weights: Path, rows: int) -> float:
    """The loss of what was trained over the rows it was trained on: proof that it was."""
    task = Fraud()
    model = task.model()
    model.load_state_dict(load_file(weights))
    data = task.data("train").columns
    with torch.no_grad():
        return float(task.losses(model, {name: column[:rows] for name, column in data.items()}).mean())


def report(rates: dict[str, list[float]], losses: dict[str, float]) -> None:
    rows = []
    for name, found in rates.items():
        against = partial(figures.ratios, rates, name)
        rows.append(
            [
                SHOWN[name],
                figures.spread(found, ".0f"),
                figures.spread(against("bare"), ".2f") if "bare" in rates else "",
                f"{losses[name]:.5f}",
            ]
        )
    print()
    figures.show(["", "steps/s", "times the bare loop", "loss after"], rows)
    print()
    for other, target in TARGETS.items():
        if other in rates and "evenstep" in rates:
            reached = median(figures.ratios(rates, "evenstep", other))
            verdict = "reached" if reached >= target else "missed"
            print(f"evenstep / {SHOWN[other]}: {reached:.2f}, at least {target} wanted: {verdict}")


if __name__ == "__main__":
    main()
