"""A training, and an evaluation, in this process: alone or as one rank of many. Puts the parts together."""

import contextlib
import functools
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep import keeping, strategies, weights
from evenstep.batches import Batches, Subset
from evenstep.config import Config, Settled
from evenstep.errors import UserError
from evenstep.evaluation import evaluate
from evenstep.files import RunFiles, new_run, write_text
from evenstep.keeping import Start
from evenstep.loop import Score, Training, Wishes, train
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order import hashing
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.progress import Values
from evenstep.ranks import agreed, choose_device, together
from evenstep.records.record import close_record, open_record
from evenstep.records.recorder import Recorder
from evenstep.snapshots.keeper import Keeper
from evenstep.snapshots.state import State
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks import catalog
from evenstep.tasks.task import Optimizing, Task
from evenstep.watch import stopping
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
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    epochs, steps = _length(config, plan)
    score = _score(config, task)
    strategy = _strategy(config, task, place, device)
    stepper = _stepper(config, task, strategy, steps)
    validate, test = (_measuring(config, task, strategy, split) for split in ("validation", "test"))
    # all that can be wrong with what was asked for has shown by now: only then is there a run
    files = RunFiles(agreed(lambda: run.folder or make_folder(config), place))
    start = keeping.begin(files, config, plan, epochs, place)
    with (
        start.mirrored(config) as mirror,
        _recorded(start, config, device, run.command) as facts,
        contextlib.closing(
            Recorder(files, place, session=start.session, steps=steps, epochs=epochs, log_every=config.log_every)
        ) as recorder,
    ):
        recorder.opened(config, plan, strategy.parameters, str(device))
        state = State(strategy=strategy, optimizer=stepper.optimizer, scaler=stepper.scaler)
        progress = start.go_on(state, recorder)
        keeper = start.keeper(state, config, mirror, recorder, progress)
        facts["snapshots"] = keeper.counts
        parts = Training(
            batches=_batches(config, task, data, plan, strategy, augment_seed=config.seed),
            stepper=stepper,
            recorder=recorder,
            validate=validate or dict,
            keep_best=functools.partial(weights.keep, strategy, files.weights("best")),
            snapshot=keeper.take,
            snapshot_every=config.snapshot_every,
            wishes=functools.partial(_wishes, keeper, files),
            score=score,
            epochs=epochs,
            max_steps=config.max_steps,
            patience=config.patience,
        )
        with contextlib.closing(keeper), stopping.listening():
            ended = train(parts, progress)
            keeper.finish(None if ended else progress)
        facts |= {"parameters": strategy.parameters, **progress.outcome()}
        if ended:
            _keep_last(strategy, files)
            facts["test"] = _of_best(test, strategy, files)
            recorder.measured("test", progress.best_epoch, progress.number, facts["test"])
            recorder.finished(progress, facts["test"])
        else:
            facts["state"] = "stopped"
            recorder.stopped(progress)
    return files.folder


@contextlib.contextmanager
def _recorded(
    start: Start, config: Settled, device: torch.device, command: Sequence[str]
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
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError):  # a full disk may be why it ends; the reason is what counts
            told = "".join(traceback.format_exception(error))
            close_record(files, state, error=told, snapshots=facts.get("snapshots"))
        raise
    close_record(files, **{"state": "finished", **facts})


def _wishes(keeper: Keeper, files: RunFiles) -> Wishes:
    """What this rank would like to happen at the next step that suits all."""
    return Wishes(stop=stopping.requested() or files.stop.exists(), snapshot=keeper.wished())


def _evaluate(config: Settled, task: Task, kept: Path, split: str, place: World, device: torch.device) -> Values:
    strategy = _strategy(config, task, place, device)
    weights.take(strategy, kept)
    measure = _measuring(config, task, strategy, split)
    if measure is None:
        raise UserError(f"{config.task} has no {split} data")
    return measure()


def _keep_last(strategy: Strategy, files: RunFiles) -> None:
    try:
        weights.keep(strategy, files.weights("last"))
    except NotKept as error:
        raise UserError(f"the last weights could not be kept: {error}; see to that, then resume the run") from None


def _of_best(measure: Callable[[], Values] | None, strategy: Strategy, files: RunFiles) -> Values:
    """What the best weights come to; nothing where there is no data for it."""
    if measure is None:
        return {}
    weights.take(strategy, files.weights("best"))
    return measure()


def _measuring(config: Settled, task: Task, strategy: Strategy, split: str) -> Callable[[], Values] | None:
    """What measures the model as it is on a split; None where the task has no such data."""
    data = task.data(split)
    if data is None:
        return None
    at_once = EVALUATED_AT_ONCE * (config.micro_batch or -(-config.global_batch // strategy.world))
    plan = Plan(size=len(data), global_batch=at_once * strategy.world, policy="sequential")
    batches = _batches(config, task, data, plan, strategy, augment_seed=None)
    return functools.partial(evaluate, batches, task, strategy, config.precision)


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


def _score(config: Settled, task: Task) -> Score:
    """What makes a validation the best one."""
    if config.best is not None and task.data("validation") is None:
        raise UserError(f"{config.task} has no validation data to say what is best: leave --best out")
    return Score(config.best or task.goal, ("loss", *task.metrics()))


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
