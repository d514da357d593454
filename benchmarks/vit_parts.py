"""What `vit.py` runs in processes of their own: the usual recipe, and the machine's ceiling."""

import argparse
import json
import time
from pathlib import Path
from statistics import median

from evenstep import world  # first: it mends a torchvision that was built for another torch

# isort: split
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import CIFAR10

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
# rows, inner and columns of products: square ones, and those of ViT-B's layers
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (4800, 768, 3072), (4800, 3072, 768))


def usual(model_name: str, batch_size: int, steps: int) -> list[float]:
    """The recipe of tutorials: every image resized and normalised by itself, all in float32, Adam."""
    torch.manual_seed(0)
    model = timm.create_model(model_name, num_classes=10)
    transform = transforms.Compose(
        [
            transforms.Resize(model.default_cfg["input_size"][1:]),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    data = CIFAR10(str(world.data_home()), train=True, transform=transform)
    loader = iter(DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ends = []
    for _ in range(steps):
        images, labels = next(loader)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        ends.append(time.time())
    return ends


def ceiling(seconds: float) -> float:
    """bf16 operations a second in the fastest of several matrix products, each repeated for so long."""
    best = 0.0
    for rows, inner, columns in SHAPES:
        a = torch.randn(rows, inner, dtype=torch.bfloat16)
        b = torch.randn(inner, columns, dtype=torch.bfloat16)
        out = a @ b
        took = []
        while sum(took) < seconds:
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            took.append(time.perf_counter() - started)
        best = max(best, 2 * rows * inner * columns / median(took))
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("usual", "ceiling"))
    parser.add_argument("--model")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    if args.part == "usual":
        found: object = usual(args.model, args.batch_size, args.steps)
    else:
        found = ceiling(args.seconds)
    args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
