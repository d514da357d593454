"""What a training is made of, put together before there is a run: what is wrong with the options shows here."""

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep import strategies
from evenstep.batches import Batches, Order, Subset
from evenstep.config import Settled
from evenstep.errors import UserError
from evenstep.evaluation import evaluate
from evenstep.loop import Score
from evenstep.optimizing import lr_factor, make_optimizer
from evenstep.order import hashing
from evenstep.order.plan import Plan
from evenstep.precision import HALF, stored
from evenstep.progress import Values
from evenstep.step import Stepper
from evenstep.strategies.batchnorm import even
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Optimizing, Task
from evenstep.watch import drift, fingerprint
from evenstep.watch.fingerprint import Fingerprint
from evenstep.watch.pulse import Pulse
from evenstep.world import World

EVALUATED_AT_ONCE = 4  # times the samples a rank trains on at once: without gradients there is room

# what measures the model as it is, unless somebody wishes to stop
Measure = Callable[[Callable[[], bool]], Values]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A training but for its run."""

    config: Settled
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


def prepare(
    config: Settled, task: Task, place: World, device: torch.device, pulse: Pulse, opened: contextlib.ExitStack
) -> Parts:
    """Put them together. Every rank has to ask; UserError where their ranks do not run the same."""
    data = task.data("train")
    if config.sample is not None:
        data = Subset(data, config.sample, config.seed)
    plan = config.plan(len(data))
    epochs, steps = _length(config, plan)
    score = _score(config, task)
    model = model_of(config, task, device)
    runs = fingerprint.taken(config, task, data, model)
    drifted = drift.compare(runs, place, allow=config.allow_drift)
    strategy = strategy_of(config, task, model, place, device)
    order = opened.enter_context(_order(config, plan, epochs, place))
    batches = _batches(config, task, data, order, strategy, augment_seed=config.seed)
    return Parts(
        config=config,
        place=place,
        plan=plan,
        epochs=epochs,
        steps=steps,
        score=score,
        strategy=strategy,
        stepper=_stepper(config, task, strategy, steps, pulse),
        batches=opened.enter_context(contextlib.closing(batches)),
        validation=measuring(config, task, strategy, opened, "validation", pulse),
        test=measuring(config, task, strategy, opened, "test", pulse),
        runs=runs,
        drifted=drifted,
    )


def _order(config: Settled, plan: Plan, epochs: int, place: World) -> contextlib.AbstractContextManager[Order]:
    """The plan itself, or a service that hands out the same."""
    if config.order is None:
        return contextlib.nullcontext(plan)
    from evenstep.service.remote import order_at

    return contextlib.closing(
        order_at(
            config.order,
            plan,
            epochs=epochs,
            rank=place.rank,
            world=place.size,
            token_file=None if config.order_token is None else Path(config.order_token),
            tls_ca=None if config.order_ca is None else Path(config.order_ca),
        )
    )


def measuring(
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
    config: Settled, task: Task, data: Any, order: Order, strategy: Strategy, *, augment_seed: int | None
) -> Batches:
    return Batches(
        data,
        task,
        order,
        rank=strategy.rank,
        world=strategy.world,
        device=strategy.device,
        micro_batch=config.micro_batch if augment_seed is not None else None,
        augment_seed=augment_seed,
        workers=config.workers,
        dtype=stored(config.precision),
    )


def model_of(config: Settled, task: Task, device: torch.device) -> nn.Module:
    """The model, the same on every rank."""
    _seed(config.seed)
    model = task.model()
    if config.sync_batchnorm:
        model = even(model)
    model.to(device, stored(config.precision))
    if config.compile:
        model.compile()
    return model


def strategy_of(config: Settled, task: Task, model: nn.Module, place: World, device: torch.device) -> Strategy:
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
