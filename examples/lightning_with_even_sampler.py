"""evenstep's sampler in Lightning: let the Trainer put no sampler of its own in its place.

    python examples/lightning_with_even_sampler.py

Run it again after an interruption: it goes on where its checkpoint was taken, in mid-epoch too.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from evenstep import EvenSampler  # first, since it mends a torchvision that was built for another torch

# isort: split
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Samples(L.LightningDataModule):
    """The data with its sampler, whose state goes into the checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.data = TensorDataset(
            torch.arange(321),  # only to show which samples were read
            torch.randn(321, 64),
            torch.randint(10, (321,)),
        )
        self.sampler = EvenSampler(self.data, global_batch=32, seed=7)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.data, batch_sampler=self.sampler, num_workers=1, multiprocessing_context="forkserver"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(64, 10)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        samples, features, targets = batch
        sampler = self.trainer.datamodule.sampler
        place = sampler.state_dict()
        scale = sampler.take()  # once for each batch
        show(place, samples, scale)
        return F.cross_entropy(self.model(features), targets) * scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Crash(L.Callback):
    """To try it out: stop dead after so many steps."""

    def __init__(self, after: int | None) -> None:
        self.left = after

    def on_train_batch_end(self, *_: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise SystemExit("stopped dead, as asked")


def show(place: dict[str, int], samples: torch.Tensor, scale: float) -> None:
    """One line for each batch: those of all ranks together hold every sample once an epoch."""
    line = {**place, "samples": samples.tolist() if scale else [], "scale": scale}
    print(json.dumps(line) + "\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--crash-after", type=int)
    args = parser.parse_args()

    L.seed_everything(0)
    saver = ModelCheckpoint(args.folder, "snapshot", every_n_train_steps=5, enable_version_counter=False)
    trainer = L.Trainer(
        use_distributed_sampler=False,  # the order is the sampler's business
        accelerator="cpu",
        devices=args.procs,
        strategy="ddp" if args.procs > 1 else "auto",
        max_epochs=args.epochs,
        callbacks=[saver, Crash(args.crash_after)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    snapshot = args.folder / "snapshot.ckpt"
    trainer.fit(Classifier(), Samples(), ckpt_path=snapshot if snapshot.exists() else None)


if __name__ == "__main__":
    main()
