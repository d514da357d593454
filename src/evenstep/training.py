"""A training, and an evaluation, in this process: alone or as one rank of many. Puts the parts together."""

import contextlib
import functools
import random
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep import strategies, weights, world
from evenstep.batches import Batches, Subset
from evenstep.config import Config, Settled
from evenstep.errors import UserError
from evenstep.evaluation import evaluate
from evenstep.files import RunFiles, new_run, write_text
from evenstep.loop import Training, Wishes, train
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order import hashing
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.progress import Values
from evenstep.ranks import agreed, board, choose_device, together
from evenstep.records.record import close_record, keep_fingerprint, kept_fingerprint, open_record
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
from evenstep.watch import drift, fingerprint, stopping
from evenstep.watch.fingerprint import Fingerprint
from evenstep.watch.patience import Patience
from evenstep.watch.pulse import SNAPSHOT, WEIGHTS, Pulse
from evenstep.watch.spot import Spot
from evenstep.watch.watcher import watching
from evenstep.world import World

EVALUATED_AT_ONCE = 4  # times the samples a rank trains on at once: without gradients there is room


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is asked for."""

    config: Config
    command: Sequence[str]
    folder: Path | None = None
    """Its folder; None lets rank 0 make one."""


def load_task(config: Config) -> Task:
    """The task that the options name."""
    options = {**config.set, "model_name": config.model, "data_dir": config.data}
    return catalog.load(config.task, options)


def make_folder(config: Config) -> Path:
    """A new run's folder."""
    name = Path(config.task.rpartition(":")[0] or config.task).stem
    return new_run(Path(config.runs), name, datetime.now().astimezone()).folder


def run_training(run: Run, place: World) -> Path:
    """Train as one rank; returns the run's folder."""
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


def train_here(run: Run, config: Settled, task: Task, place: World, device: torch.device) -> Path:
    """Train among ranks that have met; returns the run's folder."""
    session = agreed(lambda: uuid.uuid4().hex, place)
    patience = Patience(config.stall_timeout, compiles=config.compile)
    with watching(board(place), place, patience, session) as pulse:
        return _train(run, config, task, place, device, session, pulse)


def _train(
    run: Run, config: Settled, task: Task, place: World, device: torch.device, session: str, pulse: Pulse
) -> Path:
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    epochs, steps = _length(config, plan)
    model = _model(config, task, device)
    own = fingerprint.taken(config, task, data, model)
    drifted = drift.compare(own, place, allow=config.allow_drift)
    strategy = _strategy(config, task, model, place, device)
    stepper = _stepper(config, task, strategy, steps, pulse)
    # all that can be wrong with what was asked for has shown by now: only then is there a run
    files = RunFiles(agreed(lambda: run.folder or make_folder(config), place))
    changed = _changed(files, own, place, allow=config.allow_drift)
    with (
        _recorded(files, config, plan, place, device, run.command) as facts,
        contextlib.closing(
            Recorder(files, place, session=session, steps=steps, epochs=epochs, log_every=config.log_every)
        ) as recorder,
    ):
        recorder.opened(config, plan, strategy.parameters, str(device))
        recorder.differs(drifted, changed)
        if place.leads:
            keep_fingerprint(files, fingerprint.summary(own), drifted, changed)
        state = State(model=strategy.model, optimizer=stepper.optimizer, scaler=stepper.scaler)
        progress = resume(state, Folder(files.snapshots), place, device, recorder)
        saver = Saver(state, Folder(files.snapshots), board(place), place, keep=config.keep)
        keeper = Keeper(saver, device, minutes=config.snapshot_minutes, report=recorder.snapshot)
        with stopping.listening(), _spot_notices(config, place) as advised:
            parts = Training(
                batches=_batches(config, task, data, plan, strategy, augment_seed=config.seed),
                stepper=stepper,
                recorder=recorder,
                validate=_measuring(config, task, strategy, "validation", pulse) or dict,
                keep_best=functools.partial(weights.keep, strategy, files.weights("best")),
                snapshot=keeper.take,
                snapshot_every=config.snapshot_every,
                wishes=functools.partial(_wishes, keeper, files, advised),
                goal=task.goal,
                epochs=epochs,
                max_steps=config.max_steps,
                patience=config.patience,
                pulse=pulse,
            )
            ended = train(parts, progress)
            pulse.phase = SNAPSHOT
            keeper.finish()
        facts |= {"parameters": strategy.parameters, **progress.outcome()}
        if ended:
            pulse.phase = WEIGHTS
            weights.keep(strategy, files.weights("last"))
            facts["test"] = _test_best(config, task, strategy, files, pulse)
            recorder.measured("test", progress.best_epoch, progress.number, facts["test"])
            recorder.finished(progress, facts["test"])
        else:
            facts["state"] = "stopped"
            recorder.stopped(progress)
    return files.folder


def _aloud(line: str) -> None:
    """From whatever rank: what cannot wait until the ranks compare notes."""
    sys.stderr.write(f"evenstep: {line}\n")


def _changed(files: RunFiles, own: Fingerprint, place: World, *, allow: bool) -> list[str]:
    """What is not as it was when the run began; UserError where that forbids to go on."""
    changed = agreed(lambda: drift.since(kept_fingerprint(files), fingerprint.summary(own)), place)
    forbidding = drift.forbids(changed)
    if forbidding and not allow:
        raise UserError(
            f"{files.folder} was begun with other {drift.shown(forbidding)}; bring back what it was, or go on "
            "with --allow-drift"
        )
    return changed


@contextlib.contextmanager
def _spot_notices(config: Settled, place: World) -> Iterator[threading.Event]:
    """Let one rank of a node look for them, where the run says so; the event is the advice to take a snapshot."""
    advised = threading.Event()
    if config.spot is None or place.local_rank > 0:
        yield advised
        return
    spot = Spot(
        world.metadata_service(),
        stop=functools.partial(stopping.request, signal.SIGUSR1),
        save=advised.set,
        say=lambda line: _aloud(f"rank {place.rank} on {place.host}: {line}"),
    )
    spot.start()
    try:
        yield advised
    finally:
        spot.close()


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
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        close_record(files, state, error="".join(traceback.format_exception(error)))
        raise
    close_record(files, **{"state": "finished", **facts})


def _wishes(keeper: Keeper, files: RunFiles, advised: threading.Event) -> Wishes:
    """What this rank would like to happen at the next step that suits all."""
    advice = advised.is_set()
    advised.clear()
    return Wishes(stop=stopping.requested() or files.stop.exists(), snapshot=advice or keeper.wished())


def _evaluate(config: Settled, task: Task, kept: Path, split: str, place: World, device: torch.device) -> Values:
    strategy = _strategy(config, task, _model(config, task, device), place, device)
    weights.take(strategy, kept)
    measure = _measuring(config, task, strategy, split, Pulse())
    if measure is None:
        raise UserError(f"{config.task} has no {split} data")
    return measure()


def _test_best(config: Settled, task: Task, strategy: Strategy, files: RunFiles, pulse: Pulse) -> Values:
    measure = _measuring(config, task, strategy, "test", pulse)
    if measure is None:
        return {}
    weights.take(strategy, files.weights("best"))
    return measure()


def _measuring(
    config: Settled, task: Task, strategy: Strategy, split: str, pulse: Pulse
) -> Callable[[], Values] | None:
    """What measures the model as it is on a split; None where the task has no such data."""
    data = task.data(split)
    if data is None:
        return None
    at_once = EVALUATED_AT_ONCE * (config.micro_batch or -(-config.global_batch // strategy.world))
    plan = Plan(size=len(data), global_batch=at_once * strategy.world, policy="sequential")
    batches = _batches(config, task, data, plan, strategy, augment_seed=None)
    return functools.partial(evaluate, batches, task, strategy, config.precision, pulse)


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


def _model(config: Settled, task: Task, device: torch.device) -> nn.Module:
    """The model, the same on every rank."""
    _seed(config.seed)
    model = task.model()
    if config.sync_batchnorm:
        model = even(model)
    model.to(device, stored(config.precision))
    if config.compile:
        model.compile()
    return model


def _strategy(config: Settled, task: Task, model: nn.Module, place: World, device: torch.device) -> Strategy:
    """The model with what exchanges its gradients around it."""
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


def _stepper(config: Settled, task: Task, strategy: Strategy, steps: int, pulse: Pulse) -> Stepper:
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
        pulse=pulse,
        skips=config.on_nan == "skip",
    )


def _length(config: Settled, plan: Plan) -> tuple[int, int]:
    """Epochs, and steps over all of them."""
    steps, epoch = 0, 0
    for epoch in range(config.epochs):
        steps += plan.steps(epoch)
        if config.max_steps is not None and steps >= config.max_steps:
            return epoch + 1, config.max_steps
    return epoch + 1, steps
