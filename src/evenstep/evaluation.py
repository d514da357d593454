"""Validation and test: each sample once, over all ranks, in one forward pass."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from evenstep import metrics as exact
from evenstep.batches import Batches, Micro
from evenstep.pace import Stops
from evenstep.precision import computing
from evenstep.progress import Values
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Task
from evenstep.watch.pulse import EVALUATE, FIRST, METRICS, Pulse


class Interrupted(Exception):
    """Somebody wishes to stop before the evaluation has come to its end; all ranks leave it at the same batch."""


def evaluate(
    batches: Batches,
    task: Task,
    strategy: Strategy,
    precision: str,
    stop_wished: Callable[[], bool] = lambda: False,
    pulse: Pulse | None = None,
) -> Values:
    """The loss and the task's metrics over the data, the same on every rank."""
    pulse = pulse or Pulse()
    pulse.piece, pulse.phase = 0, EVALUATE if pulse.evaluated else FIRST
    strategy.settle()
    measured = _Measured(task, strategy.device)
    idle = _Measured(task, strategy.device)  # takes what a rank without samples computes to keep step
    stops = Stops(stop_wished, strategy.device, strategy.world)
    with _evaluating(strategy), torch.no_grad(), computing(precision, strategy.device):
        for step in batches.epoch(0):
            for micro in step.micros:
                strategy.count(micro.counts)
                (measured if micro.counts else idle).take(task, _OnePass(strategy.called), micro)
                pulse.piece += 1
                pulse.phase = EVALUATE
            if stops.wished():
                raise Interrupted
    pulse.evaluated += 1
    pulse.phase = METRICS
    return exact.merged({"loss": measured.loss, **measured.metrics}, strategy.world)


@contextlib.contextmanager
def _evaluating(strategy: Strategy) -> Iterator[None]:
    """The model in evaluation mode for a while; parts that its author has put to rest rest afterwards too."""
    strategy.count(True)
    before = [(part, part.training) for part in strategy.called.modules()]
    strategy.called.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


class _Measured:
    def __init__(self, task: Task, device: torch.device) -> None:
        self.loss = exact.local({"loss": exact.Mean()}, device)["loss"]
        self.metrics: Mapping[str, Metric] = exact.local(task.metrics(), device)

    def take(self, task: Task, model: "_OnePass", micro: Micro) -> None:
        self.loss.update(task.losses(cast(nn.Module, model), micro.batch))
        if self.metrics:
            task.measure(self.metrics, cast(nn.Module, model), micro.batch)


class _OnePass:
    """The model, but asked again for what it has just computed it answers from memory.

    A task's `losses` and `predict` both call the model on the batch; in evaluation that would be twice the
    work for the same answer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._asked: tuple[Any, ...] = ()
        self._answer: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return self._model(*args, **kwargs)
        if not self._asked or len(args) != len(self._asked) or not all(map(_same, args, self._asked)):
            self._asked, self._answer = args, self._model(*args)
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _same(a: Any, b: Any) -> bool:
    """The very same tensor, or nothing both times; a dict may have changed meanwhile."""
    return a is b and (a is None or isinstance(a, Tensor))
