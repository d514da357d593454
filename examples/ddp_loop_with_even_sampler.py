"""A bare DDP loop with evenstep's sampler, and nothing else of evenstep.

    torchrun --standalone --nproc-per-node=2 examples/ddp_loop_with_even_sampler.py

Run it again after an interruption, with any number of processes: it goes on where its snapshot was taken.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep import EvenSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/ddp_loop"))
    parser.add_argument("--crash-after", type=int, help="to try it out: stop dead after so many steps")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    snapshot = args.folder / "snapshot.pt"

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(
        torch.arange(321),  # only to show which samples were read
        torch.randn(321, 64),
        torch.randint(10, (321,)),
    )
    sampler = EvenSampler(data, global_batch=32, seed=7)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])

    steps = 0
    while sampler.epoch < args.epochs:
        for samples, features, targets in loader:
            place = sampler.state_dict()
            scale = sampler.take()  # once for each batch
            loss = F.cross_entropy(model(features), targets) * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            show(place, samples, scale)
            steps += 1
            if steps % 5 == 0 and dist.get_rank() == 0:
                states = {"model": model, "optimizer": optimizer, "sampler": sampler}
                torch.save({name: part.state_dict() for name, part in states.items()}, f"{snapshot}.new")
                Path(f"{snapshot}.new").replace(snapshot)
            if steps == args.crash_after:
                raise SystemExit("stopped dead, as asked")
    dist.destroy_process_group()


def show(place: dict[str, int], samples: torch.Tensor, scale: float) -> None:
    """One line for each batch: those of all ranks together hold every sample once an epoch."""
    line = {**place, "samples": samples.tolist() if scale else [], "scale": scale}
    print(json.dumps(line) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
