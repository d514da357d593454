"""evenstep's sampler in Accelerate: prepare the model and the optimizer, but not the loader.

    accelerate launch --cpu --num_processes 2 examples/accelerate_with_even_sampler.py

The loader's batches are this rank's already; `prepare` would deal them out a second time (with this sampler
it refuses). Run it again after an interruption: it goes on where its snapshot was taken, in mid-epoch too.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep import EvenSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--crash-after", type=int, help="to try it out: stop dead after so many steps")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = TensorDataset(
        torch.arange(321),  # only to show which samples were read
        torch.randn(321, 64),
        torch.randint(10, (321,)),
    )
    sampler = EvenSampler(data, global_batch=32, seed=7)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
    model = nn.Linear(64, 10)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(sampler)  # it has a state_dict and a load_state_dict

    if args.folder.exists():
        accelerator.load_state(args.folder)

    steps = 0
    while sampler.epoch < args.epochs:
        for samples, features, targets in loader:
            place = sampler.state_dict()
            scale = sampler.take()  # once for each batch
            features, targets = features.to(accelerator.device), targets.to(accelerator.device)
            loss = F.cross_entropy(model(features), targets) * scale
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            show(place, samples, scale)
            steps += 1
            if steps % 5 == 0:
                accelerator.save_state(args.folder)
            if steps == args.crash_after:
                raise SystemExit("stopped dead, as asked")
    accelerator.end_training()


def show(place: dict[str, int], samples: torch.Tensor, scale: float) -> None:
    """One line for each batch: those of all ranks together hold every sample once an epoch."""
    line = {**place, "samples": samples.tolist() if scale else [], "scale": scale}
    print(json.dumps(line) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
