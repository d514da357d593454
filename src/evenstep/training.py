"""A training, and an evaluation, in this process: alone or as one rank of many. Puts the parts together."""

import contextlib
import functools
import gc
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from evenstep import strategies, world
from evenstep.batches import Batches, Subset
from evenstep.config import Config, Settled
from evenstep.errors import UserError
from evenstep.evaluation import Values, evaluate
from evenstep.files import RunFiles, new_run, replacing, write_text
from evenstep.loop import Training, train
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order import hashing
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.records.record import close_record, open_record
from evenstep.records.recorder import Recorder
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks import catalog
from evenstep.tasks.task import Optimizing, Task
from evenstep.world import World

EVALUATED_AT_ONCE = 4  # times the samples a rank trains on at once: without gradients there is room
PATIENCE_WITH_PEERS = timedelta(minutes=10)  # the others may be reading data for the first time


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


def run_evaluation(config: Config, weights: Path, split: str, place: World) -> Values:
    """Measure weights on a split of the task's data, as one rank."""
    task = load_task(config)
    config = config.complete(task.defaults, place)
    device = choose_device(config.device, place)
    with together(config, place, device):
        return _evaluate(config, task, weights, split, place, device)


@contextlib.contextmanager
def _recorded(
    files: RunFiles, config: Settled, place: World, device: torch.device, command: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The record of a run from its start to its end, however it ends; rank 0 writes it."""
    facts: dict[str, Any] = {}
    if not place.leads:
        yield facts
        return
    write_text(files.config, config.as_yaml())
    open_record(files, config, place, str(device), command)
    try:
        yield facts
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        close_record(files, state, error="".join(traceback.format_exception(error)))
        raise
    close_record(files, "finished", **facts)


def train_here(run: Run, config: Settled, task: Task, place: World, device: torch.device) -> Path:
    """Train among ranks that have met; returns the run's folder."""
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    strategy = _strategy(config, task, place, device)
    # all that can be wrong with what was asked for has shown by now: only then is there a run
    files = RunFiles(_agreed_folder(run, config, place))
    with _recorded(files, config, place, device, run.command) as facts:
        epochs, steps = _length(config, plan)
        with contextlib.closing(Recorder(files, place, steps=steps, epochs=epochs)) as recorder:
            recorder.opened(config, plan, strategy.parameters, str(device))
            parts = Training(
                batches=_batches(config, task, data, plan, strategy, augment_seed=config.seed),
                stepper=_stepper(config, task, strategy, steps),
                recorder=recorder,
                validate=_measuring(config, task, strategy, "validation") or dict,
                keep_best=functools.partial(_keep, strategy, files, "best"),
                goal=task.goal,
                epochs=epochs,
                max_steps=config.max_steps,
                patience=config.patience,
                report_every=config.log_every,
            )
            outcome = train(parts)
            _keep(strategy, files, "last")
            test = _test_best(config, task, strategy, files)
            recorder.measured("test", outcome.best_epoch, outcome.steps, test)
            recorder.closed(outcome.best_epoch, test)
        facts |= {"parameters": strategy.parameters, **outcome.facts(), "test": test}
    return files.folder


def _evaluate(
    config: Settled, task: Task, weights: Path, split: str, place: World, device: torch.device
) -> Values:
    strategy = _strategy(config, task, place, device)
    strategy.load(load_file(weights) if place.leads else {})
    measure = _measuring(config, task, strategy, split)
    if measure is None:
        raise UserError(f"{config.task} has no {split} data")
    return measure()


def _test_best(config: Settled, task: Task, strategy: Strategy, files: RunFiles) -> Values:
    measure = _measuring(config, task, strategy, "test")
    if measure is None:
        return {}
    strategy.load(load_file(files.weights("best")) if strategy.rank == 0 else {})
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


def _keep(strategy: Strategy, files: RunFiles, which: str) -> None:
    """The weights as they are now, as a file of the run."""
    weights = strategy.weights()
    if strategy.rank == 0:
        with replacing(files.weights(which)) as path:
            save_file(_apart(weights), path)


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that share memory with another: safetensors takes each tensor for itself."""
    seen: set[int] = set()
    found = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found


# This process among the others


def choose_device(wanted: str, place: World) -> torch.device:
    """Where this rank computes; `auto` is the fastest there is."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if place.size == 1 and torch.backends.mps.is_available():
            wanted = "mps"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device cuda: torch finds no CUDA device here; take --device cpu")
        found = torch.cuda.device_count()
        if place.local_size > found:
            raise UserError(
                f"{place.local_size} processes need a GPU each, and {place.host} has {found}; "
                f"take --procs {found}, or --device cpu"
            )
        return torch.device("cuda", place.local_rank)
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("device mps: torch finds none here; take --device cpu")
        if place.size > 1:
            raise UserError("device mps has no collectives; take --procs 1, or --device cpu")
    return torch.device(wanted)


@contextlib.contextmanager
def together(config: Settled, place: World, device: torch.device) -> Iterator[None]:
    """Among the other ranks, for as long as it takes."""
    if place.local_size > 1:
        torch.set_num_threads(world.threads_wanted() or max(1, world.cores() // place.local_size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.strategy not in ("ddp", "fsdp"):
        yield
        return
    # objects travel by gloo also where gradients travel by NCCL
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # alone, there is nobody to meet and no port to open
    store = HashStore() if place.size == 1 else None
    dist.init_process_group(
        backend, rank=place.rank, world_size=place.size, store=store, timeout=PATIENCE_WITH_PEERS
    )
    group = dist.group.WORLD
    try:
        yield
    except BaseException:
        if place.size == 1:
            dist.destroy_process_group()
        raise  # with others in the group, to take leave would be to wait for them
    # Whoever lets go of gloo's group last waits for its threads, and they may want the interpreter to drop a
    # tensor: DDP waits without giving it up, and hangs for good. So DDP goes first, and the group itself last.
    gc.collect()
    dist.destroy_process_group()
    del group


def _agreed_folder(run: Run, config: Settled, place: World) -> Path:
    """The run's folder, the same for all ranks; rank 0 makes one unless the launcher did."""
    agreed = [run.folder]
    if run.folder is None and place.leads:
        agreed = [make_folder(config)]
    if place.size > 1:
        dist.broadcast_object_list(agreed, src=0)
    assert agreed[0] is not None
    return agreed[0]
