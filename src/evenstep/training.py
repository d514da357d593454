"""A training, and an evaluation, in this process: alone or as one rank of many. Puts the parts together."""

import contextlib
import functools
import random
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep import home, strategies, weights
from evenstep.batches import Batches, Subset
from evenstep.config import Config, Settled
from evenstep.errors import UserError
from evenstep.evaluation import Interrupted, evaluate
from evenstep.files import RunFiles, new_run, write_text
from evenstep.loop import Score, Training, Wishes, train
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order import hashing
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.progress import Values
from evenstep.ranks import agreed, board, choose_device, together
from evenstep.records.record import close_record, open_record
from evenstep.records.recorder import Recorder
from evenstep.snapshots.keeper import Keeper
from evenstep.snapshots.restore import resume
from evenstep.snapshots.saver import Saver
from evenstep.snapshots.state import State
from evenstep.snapshots.storage import Folder
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks import catalog
from evenstep.tasks.task import Optimizing, Task
from evenstep.watch import stopping
from evenstep.world import World

EVALUATED_AT_ONCE = 4  # times the samples a rank trains on at once: without gradients there is room


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is asked for."""

    config: Config
    command: Sequence[str]
    folder: Path | None = None
    """Its folder; None lets rank 0 make one."""


class Ended(NamedTuple):
    """A training that has come to an end: to its own, or to one that somebody wished for."""

    folder: Path
    stopped: bool


def load_task(config: Config) -> Task:
    """The task that the options name."""
    options = {**config.set, "model_name": config.model, "data_dir": config.data}
    return catalog.load(config.task, options)


def make_folder(config: Config) -> Path:
    """A new run's folder."""
    name = Path(config.task.rpartition(":")[0] or config.task).stem
    return new_run(Path(config.runs), name, datetime.now().astimezone()).folder


def run_training(run: Run, place: World) -> Ended:
    """Train as one rank."""
    task = load_task(run.config)
    config = run.config.complete(task.defaults, place)
    device = choose_device(config.device, place)
    with together(config, place, device):
        return train_here(run, config, task, place, device)


def run_evaluation(config: Config, kept: Path, split: str, place: World) -> Values:
    """Measure weights on a split of the task's data, as one rank."""
    task = load_task(config)
    config = config.complete(task.defaults, place)
    device = choose_device(config.device, place)
    with together(config, place, device):
        return _evaluate(config, task, kept, split, place, device)


def train_here(run: Run, config: Settled, task: Task, place: World, device: torch.device) -> Ended:
    """Train among ranks that have met."""
    found = home.find(run.folder, place)
    if found.folder is not None and found.state == "finished":  # one rank fell as all were about to leave
        return Ended(found.folder, False)
    config = found.settled(config)
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    epochs, steps = _length(config, plan)
    score = Score(task.goal, ("loss", *task.metrics()))
    strategy = _strategy(config, task, place, device)
    stepper = _stepper(config, task, strategy, steps)
    held_out = {split: task.data(split) for split in ("validation", "test")}
    session = agreed(lambda: uuid.uuid4().hex, place)
    # all that can be wrong with what was asked for has shown by now: only then is there a run
    with (
        home.opened(found, functools.partial(make_folder, config), place) as files,
        _recorded(files, config, plan, place, device, run.command) as facts,
        contextlib.closing(
            Recorder(files, place, plan, session=session, steps=steps, epochs=epochs, log_every=config.log_every)
        ) as recorder,
        contextlib.ExitStack() as opened,
    ):
        recorder.opened(config, strategy.parameters, str(device))
        state = State(model=strategy.model, optimizer=stepper.optimizer, scaler=stepper.scaler)
        progress = resume(state, Folder(files.snapshots), place, device, recorder)
        progress.session = session
        saver = Saver(state, Folder(files.snapshots), board(place), place, keep=config.keep)
        keeper = Keeper(saver, device, minutes=config.snapshot_minutes, report=recorder.snapshot)
        measuring = functools.partial(_measuring, config, task, strategy, opened)
        stop_wished = functools.partial(_stop_wished, files)
        batches = _batches(config, task, data, plan, strategy, augment_seed=config.seed)
        parts = Training(
            batches=opened.enter_context(contextlib.closing(batches)),
            stepper=stepper,
            recorder=recorder,
            validate=measuring(held_out["validation"], stop_wished) or dict,
            keep_best=functools.partial(weights.keep, strategy, files.weights("best")),
            snapshot=keeper.take,
            snapshot_every=config.snapshot_every,
            wishes=lambda: Wishes(stop=stop_wished(), snapshot=keeper.wished()),
            score=score,
            epochs=epochs,
            max_steps=config.max_steps,
            patience=config.patience,
        )
        with stopping.listening():
            test = None
            if train(parts, progress):
                weights.keep(strategy, files.weights("last"))
                test = _test_best(measuring(held_out["test"], stop_wished), strategy, files)
                if test is None:
                    keeper.take(progress)
            keeper.finish()
        facts |= {"parameters": strategy.parameters, **progress.outcome()}
        if test is None:
            facts["state"] = "stopped"
            recorder.stopped(progress)
        else:
            facts["test"] = test
            recorder.measured("test", progress.best_epoch, progress.number, test)
            recorder.finished(progress, test)
    return Ended(files.folder, test is None)


@contextlib.contextmanager
def _recorded(
    files: RunFiles, config: Settled, plan: Plan, place: World, device: torch.device, command: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The record of a run from its start to its end, however it ends; rank 0 writes it."""
    facts: dict[str, Any] = {}
    if not place.leads:
        yield facts
        return
    if not files.config.exists():
        write_text(files.config, config.as_yaml())
    open_record(files, config, plan, place, str(device), command)
    try:
        yield facts
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt | stopping.Stopped) else "failed"
        close_record(files, state, error="".join(traceback.format_exception(error)))
        raise
    close_record(files, **{"state": "finished", **facts})


def _stop_wished(files: RunFiles) -> bool:
    """Whether somebody has asked this rank to stop, or the run."""
    return stopping.requested() is not None or files.stop.exists()


def _evaluate(config: Settled, task: Task, kept: Path, split: str, place: World, device: torch.device) -> Values:
    strategy = _strategy(config, task, place, device)
    weights.take(strategy, kept)
    with contextlib.ExitStack() as opened:
        measure = _measuring(config, task, strategy, opened, task.data(split))
        if measure is None:
            raise UserError(f"{config.task} has no {split} data")
        return measure()


def _test_best(measure: Callable[[], Values] | None, strategy: Strategy, files: RunFiles) -> Values | None:
    """What the best weights are worth; None if somebody wished to stop before that was clear."""
    if measure is None:
        return {}
    weights.take(strategy, files.weights("best"))
    try:
        return measure()
    except Interrupted:
        weights.take(strategy, files.weights("last"))
        return None


def _measuring(
    config: Settled,
    task: Task,
    strategy: Strategy,
    opened: contextlib.ExitStack,
    data: Any,
    stop_wished: Callable[[], bool] = lambda: False,
) -> Callable[[], Values] | None:
    """What measures the model as it is on the samples of a split; None where the task has none."""
    if data is None:
        return None
    at_once = EVALUATED_AT_ONCE * (config.micro_batch or -(-config.global_batch // strategy.world))
    plan = Plan(size=len(data), global_batch=at_once * strategy.world, policy="sequential")
    batches = _batches(config, task, data, plan, strategy, augment_seed=None)
    opened.enter_context(contextlib.closing(batches))
    return functools.partial(evaluate, batches, task, strategy, config.precision, stop_wished)


def _batches(
    config: Settled, task: Task, data: Any, plan: Plan, strategy: Strategy, *, augment_seed: int | None
) -> Batches:
    return Batches(
        data,
        task,
        plan,
        rank=strategy.rank,
        world=strategy.world,
        device=strategy.device,
        micro_batch=config.micro_batch if augment_seed is not None else None,
        augment_seed=augment_seed,
        workers=config.workers,
        dtype=stored(config.precision),
    )


def _strategy(config: Settled, task: Task, place: World, device: torch.device) -> Strategy:
    """The model, the same on every rank, with what exchanges its gradients around it."""
    _seed(config.seed)
    model = task.model()
    if config.sync_batchnorm:
        model = even(model)
    model.to(device, stored(config.precision))
    if config.compile:
        model.compile()
    strategy = strategies.make(
        config.strategy,
        model,
        place,
        device,
        units=task.units(model),
        gathered=HALF.get(config.precision),
        unused_parameters=task.unused_parameters,
    )
    _seed(hashing.key("rank", config.seed, place.rank) >> 32)  # dropout must not be the same on all ranks
    return strategy


def _seed(seed: int) -> None:
    """All generators that a model's author may draw initial weights from."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _stepper(config: Settled, task: Task, strategy: Strategy, steps: int) -> Stepper:
    settings = Optimizing(
        optimizer=config.optimizer,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
    )
    optimizer = task.optimizer(strategy.model, settings)
    return Stepper(
        task,
        strategy,
        optimizer or make_optimizer(strategy.model, settings, strategy.device),
        precision=config.precision,
        clip=config.clip,
        lr_factor=functools.partial(lr_factor, config.schedule, steps=steps, warmup=config.warmup_steps),
    )


def _length(config: Settled, plan: Plan) -> tuple[int, int]:
    """Epochs, and steps over all of them."""
    steps, epoch = 0, 0
    for epoch in range(config.epochs):
        steps += plan.steps(epoch)
        if config.max_steps is not None and steps >= config.max_steps:
            return epoch + 1, config.max_steps
    return epoch + 1, steps
