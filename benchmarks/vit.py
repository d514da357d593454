"""A vision transformer on CPU: evenstep in bf16 against the usual recipe, and against what the machine can do.

    EVENSTEP_DATA=... python benchmarks/vit.py --out vit.json

ViT-B/32 at 224 pixels learns CIFAR-10 in one process. The usual recipe resizes each image by itself with
torchvision, and computes in float32. evenstep trains by its own command with `--precision bf16`: images are
resized by the batch, and Adam is fused; it also crops and flips them, keeps records and writes snapshots. Both
run in fresh processes, in turn, in every round; the first two steps are left out, in which memory still grows.
The ceiling is the fastest of several bf16 matrix products, measured before and after evenstep's training in
each round; what an image costs in a training step is counted by torch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import figures
from evenstep.files import RunFiles
from evenstep.records.events import read_events

HERE = Path(__file__).parent
TIMES, SHARE = 3.0, 0.7  # wanted
CEILING_SECONDS = 2.0
WARM_UP = 2  # steps
PACKAGES = ("torch", "torchvision", "timm", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=4, help="of the usual recipe; evenstep takes three times as many"
    )
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--model", default="vit_base_patch32_224")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    cost = operations(args.model)
    print(f"{args.model}: {cost / 1e9:.1f} GFLOP to train on an image")
    rates: dict[str, list[float]] = {"usual": [], "evenstep": []}
    ceilings = []
    for round_ in range(args.rounds):
        for name in figures.rotated(list(rates), round_):
            if name == "usual":
                rates[name].append(usual(args.model, args.batch_size, WARM_UP + args.steps))
            else:
                before = ceiling()
                rates[name].append(evenstep(args.model, args.batch_size, WARM_UP + 3 * args.steps))
                ceilings.append(max(before, ceiling()))
        print(
            f"round {round_ + 1}: usual {rates['usual'][-1]:.2f}, evenstep {rates['evenstep'][-1]:.2f} images/s; "
            f"ceiling {ceilings[-1] / 1e12:.2f} TFLOP/s",
            flush=True,
        )
    report(rates, ceilings, cost)
    figures.write(
        args.out,
        PACKAGES,
        images_per_second=rates,
        ceilings=ceilings,
        operations_per_image=cost,
        command=sys.argv,
    )


def operations(model_name: str) -> int:
    """Floating point operations of one image's part in a training step."""
    import timm
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = timm.create_model(model_name, num_classes=10)
    images = torch.zeros(1, *model.default_cfg["input_size"])
    # in this form attention consists of matrix products, which the counter knows
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images).sum().backward()
    return int(counter.get_total_flops())


def usual(model: str, batch_size: int, steps: int) -> float:
    """Images a second of the usual recipe."""
    ends: list[float] = part("usual", "--model", model, "--batch-size", batch_size, "--steps", steps)
    return (steps - WARM_UP) * batch_size / (ends[-1] - ends[WARM_UP - 1])


def ceiling() -> float:
    """bf16 operations a second, with as many threads as a training has."""
    return float(part("ceiling", "--seconds", CEILING_SECONDS))


def part(name: str, *options: object):
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        run([sys.executable, HERE / "vit_parts.py", name, *options, "--result", result])
        return json.loads(result.read_text())


def evenstep(model: str, batch_size: int, steps: int) -> float:
    """Images a second of evenstep's own command, from the times at which it recorded its steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "evenstep", "train", HERE / "vit_task.py", "--model", model]
        settings = ["--precision", "bf16", "--optimizer", "adam", "--global-batch", batch_size]
        run([*command, *settings, "--max-steps", steps, "--epochs", 1, "--log-every", 1, "--runs", folder])
        events = read_events(RunFiles(next(Path(folder).iterdir())).events(0))
        done = [(event["time"], len(event["values"])) for event in events if event["name"] == "loss"]
    taken = sum(steps for _, steps in done[WARM_UP:])
    return taken * batch_size / (done[-1][0] - done[WARM_UP - 1][0])


def run(command: Sequence[object]) -> None:
    """Run a command to its end, silently unless it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def report(rates: dict[str, list[float]], ceilings: list[float], cost: int) -> None:
    times = figures.ratios(rates, "evenstep", "usual")
    shares = [rate * cost / most for rate, most in zip(rates["evenstep"], ceilings, strict=True)]
    others = [rate * cost / most for rate, most in zip(rates["usual"], ceilings, strict=True)]
    print()
    figures.show(
        ["", "images/s", "times the usual", "of the bf16 ceiling"],
        [
            [
                "usual recipe, float32",
                figures.spread(rates["usual"], ".1f"),
                "1.00",
                figures.spread(others, ".0%"),
            ],
            [
                "evenstep, bf16",
                figures.spread(rates["evenstep"], ".1f"),
                figures.spread(times, ".2f"),
                figures.spread(shares, ".0%"),
            ],
        ],
    )
    print()
    for reached, wanted, form, what in (
        (median(times), TIMES, ".2f", "times the usual recipe"),
        (median(shares), SHARE, ".0%", "of the ceiling"),
    ):
        verdict = "reached" if reached >= wanted else "missed"
        print(f"evenstep: {reached:{form}} {what}, at least {wanted:{form}} wanted: {verdict}")


if __name__ == "__main__":
    main()
