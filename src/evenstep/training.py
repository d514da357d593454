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
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from evenstep import home, keeping, memory, strategies, weights
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
from evenstep.progress import Progress, Values
from evenstep.ranks import agreed, board, choose_device, together
from evenstep.records.record import close_record, keep_fingerprint, open_record
from evenstep.records.recorder import Recorder
from evenstep.snapshots.state import State
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks import catalog
from evenstep.tasks.task import Optimizing, Task
from evenstep.watch import drift, fingerprint, spot, stopping
from evenstep.watch.fingerprint import Fingerprint
from evenstep.watch.patience import Patience
from evenstep.watch.pulse import SNAPSHOT, WEIGHTS, Pulse
from evenstep.watch.watcher import watching
from evenstep.weights import NotKept
from evenstep.world import World

EVALUATED_AT_ONCE = 4  # times the samples a rank trains on at once: without gradients there is room


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is asked for."""

    config: Config
    command: Sequence[str]
    folder: Path | None = None
    """Its folder; None lets rank 0 make one."""


# what measures the model as it is, unless somebody wishes to stop
Measure = Callable[[Callable[[], bool]], Values]


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
    if device.type == "cpu":
        memory.keep_what_is_freed()
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
    patience = Patience(config.stall_timeout, compiles=config.compile)
    name = agreed(lambda: uuid.uuid4().hex, place)
    with watching(board(place), place, patience, name) as pulse, contextlib.ExitStack() as opened:
        parts = _prepared(config, task, place, device, pulse, opened)
        # all that can be wrong with what was asked for has shown by now: only then is there a run
        files = opened.enter_context(home.opened(found, functools.partial(make_folder, config), place))
        return _train(run, config, parts, files, device, opened)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What can be put together before there is a run."""

    place: World
    plan: Plan
    epochs: int
    steps: int
    score: Score
    strategy: Strategy
    stepper: Stepper
    batches: Batches
    validation: Measure | None
    test: Measure | None
    runs: Fingerprint
    """What this rank runs."""
    drifted: list[str]
    """In what the ranks differ, though they were told to go on."""
    pulse: Pulse


def _prepared(
    config: Settled, task: Task, place: World, device: torch.device, pulse: Pulse, opened: contextlib.ExitStack
) -> _Prepared:
    """Put it together, the same on all ranks."""
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    epochs, steps = _length(config, plan)
    score = _score(config, task)
    model = _model(config, task, device)
    runs = fingerprint.taken(config, task, data, model)
    drifted = drift.compare(runs, place, allow=config.allow_drift)
    strategy = _strategy(config, task, model, place, device)
    batches = _batches(config, task, data, plan, strategy, augment_seed=config.seed)
    return _Prepared(
        place=place,
        plan=plan,
        epochs=epochs,
        steps=steps,
        score=score,
        strategy=strategy,
        stepper=_stepper(config, task, strategy, steps, pulse),
        batches=opened.enter_context(contextlib.closing(batches)),
        validation=_measuring(config, task, strategy, opened, "validation", pulse),
        test=_measuring(config, task, strategy, opened, "test", pulse),
        runs=runs,
        drifted=drifted,
        pulse=pulse,
    )


def _train(
    run: Run,
    config: Settled,
    parts: _Prepared,
    files: RunFiles,
    device: torch.device,
    opened: contextlib.ExitStack,
) -> Ended:
    """Train in a run's folder."""
    place, plan, strategy, pulse = parts.place, parts.plan, parts.strategy, parts.pulse
    start = keeping.begin(files, config, plan, parts.epochs, place)
    changed = keeping.changed(files, parts.runs, place, allow=config.allow_drift)
    mirror = opened.enter_context(start.mirrored(config))
    facts = opened.enter_context(_recorded(start, config, device, run.command))
    recorder = Recorder(
        files,
        place,
        plan,
        session=start.session,
        steps=parts.steps,
        epochs=parts.epochs,
        log_every=config.log_every,
    )
    opened.enter_context(contextlib.closing(recorder))
    recorder.opened(config, strategy.parameters, str(device))
    recorder.differs(parts.drifted, changed)
    if place.leads:
        keep_fingerprint(files, fingerprint.summary(parts.runs), parts.drifted, changed)
    state = State(strategy=strategy, optimizer=parts.stepper.optimizer, scaler=parts.stepper.scaler)
    progress = start.go_on(state, recorder)
    progress.session = start.session
    keeper = start.keeper(state, config, mirror, recorder, progress)
    facts["snapshots"] = keeper.counts
    stop_wished = functools.partial(_stop_wished, files)
    with stopping.listening(), spot.notices(config.spot, place) as advised:
        wishes = functools.partial(_wishes, stop_wished, keeper.wished, advised)
        tested = None
        if train(_together(config, parts, files, recorder, keeper.take, stop_wished, wishes), progress):
            pulse.phase = WEIGHTS
            _keep_last(strategy, files)
            tested = _test_best(parts.test, stop_wished, strategy, files)
        pulse.phase = SNAPSHOT
        keeper.finish(progress if tested is None else None)
    facts |= {"parameters": strategy.parameters, **progress.outcome()}
    if tested is None:
        facts["state"] = "stopped"
        recorder.stopped(progress)
    else:
        facts["test"] = tested
        recorder.measured("test", progress.best_epoch, progress.number, tested)
        recorder.finished(progress, tested)
    return Ended(files.folder, tested is None)


def _together(
    config: Settled,
    parts: _Prepared,
    files: RunFiles,
    recorder: Recorder,
    snapshot: Callable[[Progress], None],
    stop_wished: Callable[[], bool],
    wishes: Callable[[], Wishes],
) -> Training:
    """All that the loop needs."""
    return Training(
        batches=parts.batches,
        stepper=parts.stepper,
        recorder=recorder,
        validate=functools.partial(parts.validation, stop_wished) if parts.validation else dict,
        keep_best=functools.partial(weights.keep, parts.strategy, files.weights("best")),
        snapshot=snapshot,
        snapshot_every=config.snapshot_every,
        wishes=wishes,
        score=parts.score,
        epochs=parts.epochs,
        max_steps=config.max_steps,
        patience=config.patience,
        pulse=parts.pulse,
    )


@contextlib.contextmanager
def _recorded(
    start: keeping.Start, config: Settled, device: torch.device, command: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The record of a run from its start to its end, however it ends; rank 0 writes it."""
    facts: dict[str, Any] = {}
    files, place = start.home.files, start.home.place
    if not place.leads:
        yield facts
        return
    if not files.config.exists():
        write_text(files.config, config.as_yaml())
    open_record(files, start.run, config, start.plan, place, str(device), command)
    try:
        yield facts
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt | stopping.Stopped) else "failed"
        with contextlib.suppress(OSError):  # a full disk may be why it ends; the reason is what counts
            told = "".join(traceback.format_exception(error))
            close_record(files, state, error=told, snapshots=facts.get("snapshots"))
        raise
    close_record(files, **{"state": "finished", **facts})


def _stop_wished(files: RunFiles) -> bool:
    """Whether somebody has asked this rank to stop, or the run."""
    return stopping.requested() is not None or files.stop.exists()


def _wishes(stop_wished: Callable[[], bool], snapshot_wished: Callable[[], bool], advised: Event) -> Wishes:
    """What this rank would like to happen at the next step that suits all."""
    advice = advised.is_set()
    advised.clear()
    return Wishes(stop=stop_wished(), snapshot=advice or snapshot_wished())


def _evaluate(config: Settled, task: Task, kept: Path, split: str, place: World, device: torch.device) -> Values:
    strategy = _strategy(config, task, _model(config, task, device), place, device)
    weights.take(strategy, kept)
    with contextlib.ExitStack() as opened:
        measure = _measuring(config, task, strategy, opened, split, Pulse())
        if measure is None:
            raise UserError(f"{config.task} has no {split} data")
        return measure(lambda: False)


def _keep_last(strategy: Strategy, files: RunFiles) -> None:
    try:
        weights.keep(strategy, files.weights("last"))
    except NotKept as error:
        raise UserError(f"the last weights could not be kept: {error}; see to that, then resume the run") from None


def _test_best(
    measure: Measure | None, stop_wished: Callable[[], bool], strategy: Strategy, files: RunFiles
) -> Values | None:
    """What the best weights are worth; None if somebody wished to stop before that was clear."""
    if measure is None:
        return {}
    weights.take(strategy, files.weights("best"))
    try:
        return measure(stop_wished)
    except Interrupted:
        weights.take(strategy, files.weights("last"))
        return None


def _measuring(
    config: Settled, task: Task, strategy: Strategy, opened: contextlib.ExitStack, split: str, pulse: Pulse
) -> Measure | None:
    """What measures the model as it is on a split; None where the task has no such data."""
    data = task.data(split)
    if data is None:
        return None
    at_once = EVALUATED_AT_ONCE * (config.micro_batch or -(-config.global_batch // strategy.world))
    plan = Plan(size=len(data), global_batch=at_once * strategy.world, policy="sequential")
    batches = _batches(config, task, data, plan, strategy, augment_seed=None)
    opened.enter_context(contextlib.closing(batches))
    return functools.partial(evaluate, batches, task, strategy, config.precision, pulse=pulse)


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


def _score(config: Settled, task: Task) -> Score:
    """What makes a validation the best one."""
    if config.best is not None and task.data("validation") is None:
        raise UserError(f"{config.task} has no validation data to say what is best: leave --best out")
    return Score(config.best or task.goal, ("loss", *task.metrics()))


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
