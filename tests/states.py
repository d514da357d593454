"""Small trainings, put together by hand: their state, snapshots of it, and what comes next."""

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep import strategies
from evenstep.batches import Batches
from evenstep.files import RunFiles
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order.plan import Plan
from evenstep.progress import Progress
from evenstep.ranks import board, gathered
from evenstep.snapshots.home import Home
from evenstep.snapshots.manifest import Manifest
from evenstep.snapshots.restore import take_over
from evenstep.snapshots.saver import Saved, Saver, Saving
from evenstep.snapshots.shelf import Shelf
from evenstep.snapshots.state import State
from evenstep.snapshots.storage import Folder
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Optimizing
from evenstep.world import World, alone
from on_ranks import CPU
from tiny import Tiny

PLAN = Plan(size=47, global_batch=10, seed=3)
OPTIMIZERS = {
    "adam": Optimizing(optimizer="adam", lr=1e-2, weight_decay=0.0, momentum=0.0),
    "adamw": Optimizing(optimizer="adamw", lr=1e-2, weight_decay=0.1, momentum=0.0),
    "sgd with momentum": Optimizing(optimizer="sgd", lr=1e-2, weight_decay=0.0, momentum=0.9),
    "sgd": Optimizing(optimizer="sgd", lr=1e-2, weight_decay=0.0, momentum=0.0),
}
STEPS = 3  # before a snapshot


class Model(nn.Sequential):
    """What models have: a BatchNorm, layers in layers, a weight that is frozen, a buffer that is not saved."""

    def __init__(self) -> None:
        frozen = nn.Linear(6, 6).requires_grad_(False)
        super().__init__(nn.BatchNorm1d(6), frozen, nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 5)))
        self.append(nn.Linear(5, 1))
        self.register_buffer("passing", torch.zeros(3), persistent=False)


@dataclass
class Small:
    """A training of Tiny under a strategy."""

    place: World
    strategy: Strategy
    stepper: Stepper
    state: State
    batches: Batches
    number: int = 0

    def steps(self, count: int) -> list[float]:
        """The mean loss of each of the next steps, over all ranks."""
        losses = []
        for step in self.batches.epoch(0, self.number):
            if len(losses) == count:
                break
            loss = float(self.stepper.take(step, self.number))
            losses.append(sum(gathered(loss, self.place)) / step.total)
            self.number += 1
        return losses

    def whole(self) -> dict[str, Any]:
        """All that is learnt and gathered, whole, by name."""
        found = dict(self.strategy.model.state_dict())
        names = {id(p): name for name, p in self.strategy.model.named_parameters()}
        for parameter, held in self.stepper.optimizer.state.items():
            found |= {f"{names[id(parameter)]}.{key}": part for key, part in held.items() if part is not None}
        return {name: _full(part) for name, part in found.items()}

    def saver(self, shelf: Shelf, keep: int = 3, **settings: Any) -> Saver:
        """Who takes snapshots of it."""
        session = gathered(uuid.uuid4().hex, self.place)[0]
        saving = Saving(
            shelf=shelf,
            keep=keep,
            run={"id": "test"},
            session=session,
            **{"records": _nothing, "mirror": None, **settings},
        )
        return Saver(self.state, saving, board(self.place), self.place, good=[])

    def save(self, saver: Saver) -> Saved:
        """Take a snapshot, and wait for it."""
        saver.save(self.number, Progress(step=self.number, number=self.number).as_dict(), 0.0)
        saver.wait()
        return saver.outcomes.pop()

    def resume(self, folder: Path) -> tuple[Manifest | None, list[str]]:
        """Go on from the newest snapshot in a run's folder; what was said meanwhile."""
        said: list[str] = []
        home = Home(files=RunFiles(folder), place=self.place, afar=None, shared=True)
        found = home.newest(_nothing, said.append)
        if found is not None:
            take_over(self.state, home.folder, found, self.place.size)
            self.number = Progress.of(found.progress).number
        return found, said


def small(
    name: str,
    place: World | None = None,
    *,
    optimizer: str = "adam",
    seed: int = 0,
    model: Callable[[], nn.Module] = Model,
    scaler: torch.amp.GradScaler | None = None,
    same_norms: bool = True,
) -> Small:
    """A training that has not begun."""
    place = place or alone()
    task = Tiny()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    made = model().double()
    if same_norms:
        made = even(made)
    strategy = strategies.make(name, made, place, CPU)
    stepper = Stepper(
        task,
        strategy,
        make_optimizer(strategy.model, OPTIMIZERS[optimizer], CPU),
        precision="fp64",
        clip=None,
        lr_factor=lambda step: lr_factor("cosine", step, 50, 2),
    )
    state = State(strategy=strategy, optimizer=stepper.optimizer, scaler=scaler or stepper.scaler)
    batches = Batches(
        task.data("train"),
        task,
        PLAN,
        rank=place.rank,
        world=place.size,
        device=CPU,
        augment_seed=5,
        dtype=torch.float64,
    )
    return Small(place, strategy, stepper, state, batches)


def shelf_of(folder: Path) -> Shelf:
    """The snapshots in a run's folder."""
    return Shelf(Folder(RunFiles(folder).snapshots))


def files_of(folder: Path) -> Iterator[Path]:
    """All files under a folder."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _full(part: Any) -> Any:
    if hasattr(part, "full_tensor"):
        part = part.full_tensor()
    return part.detach().clone() if isinstance(part, Tensor) else part


def _nothing(*_: Any) -> None:
    pass
