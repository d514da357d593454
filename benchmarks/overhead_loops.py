"""The trainings that `overhead.py` compares evenstep's with, as their documentation writes them.

One rank of one of them; torchrun starts it:  overhead_loops.py bare|lightning|accelerate ...
All train evenstep's fraud model on the same rows, with Adam, and time each epoch the same way: from before
the loader is asked for its first batch until the last update is done.
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

from evenstep.tasks.fraud import Fraud  # first: it mends a torchvision that was built for another torch

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LR = 1e-3


def loss_of(model: nn.Module, features: Tensor, fraud: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(features).squeeze(1), fraud)


def bare(model: nn.Module, data: TensorDataset, batch_size: int, epochs: int) -> list[float]:
    """torch's own tutorial on DistributedDataParallel."""
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=LR)
    seconds = []
    for epoch in range(epochs):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        for features, fraud in loader:
            optimizer.zero_grad()
            loss_of(ddp, features, fraud).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def lightning(model: nn.Module, data: TensorDataset, batch_size: int, epochs: int) -> list[float]:
    """Lightning's Trainer with all that can be turned off turned off: bar, logger, checkpoints, summary."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return loss_of(self.model, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LR)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_epoch_start(self, *_: Any) -> None:
            self.started = time.perf_counter()

        def on_train_epoch_end(self, *_: Any) -> None:
            self.seconds.append(time.perf_counter() - self.started)

    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=batch_size, shuffle=True))
    return clock.seconds


def accelerate(model: nn.Module, data: TensorDataset, batch_size: int, epochs: int) -> list[float]:
    """Accelerate's own migration of the bare loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    ddp, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=LR), loader)
    seconds = []
    for _ in range(epochs):
        started = time.perf_counter()
        for features, fraud in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(ddp, features, fraud))
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


LOOPS = {"bare": bare, "lightning": lightning, "accelerate": accelerate}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    task = Fraud()
    columns = task.data("train").columns
    data = TensorDataset(columns["features"][: args.rows].clone(), columns["fraud"][: args.rows].float())
    model = task.model()
    seconds = LOOPS[args.loop](model, data, args.batch_size, args.epochs)
    if os.environ["RANK"] == "0":
        save_file(model.state_dict(), args.folder / "weights.safetensors")
        (args.folder / "seconds.json").write_text(json.dumps(seconds))
    # only now that the loop's DDP is gone: with torch 2.13, a DDP dropped after its group hangs now and then
    gc.collect()
    group = dist.group.WORLD
    dist.destroy_process_group()
    del group


if __name__ == "__main__":
    main()
