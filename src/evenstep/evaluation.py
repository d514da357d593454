"""Validation and test: each sample once, over all ranks, in one forward pass."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from evenstep import metrics as exact
from evenstep.batches import Batches, Micro
from evenstep.precision import computing
from evenstep.strategies.strategy import Strategy
from evenstep.tasks.task import Task

Values = dict[str, Any]


def evaluate(batches: Batches, task: Task, strategy: Strategy, precision: str) -> Values:
    """The loss and the task's metrics over the data, the same on every rank."""
    strategy.settle()
    measured = _Measured(task, strategy.device)
    idle = _Measured(task, strategy.device)  # takes what a rank without samples computes to keep step
    strategy.called.eval()
    model = _OnePass(strategy.called)
    with torch.no_grad(), computing(precision, strategy.device):
        for step in batches.epoch(0):
            for micro in step.micros:
                (measured if micro.counts else idle).take(task, model, micro)
    strategy.called.train()
    return exact.merged({"loss": measured.loss, **measured.metrics}, strategy.world)


class _Measured:
    def __init__(self, task: Task, device: torch.device) -> None:
        self.loss = exact.local({"loss": exact.Mean()}, device)["loss"]
        self.metrics: Mapping[str, Metric] = exact.local(task.metrics(), device)

    def take(self, task: Task, model: nn.Module, micro: Micro) -> None:
        self.loss.update(task.losses(model, micro.batch))
        if self.metrics:
            task.measure(self.metrics, model, micro.batch)


class _OnePass(nn.Module):
    """The model, but asked again for what it has just computed it answers from memory.

    A task's `losses` and `predict` both call the model on the batch; in evaluation that would be twice the
    work for the same answer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # not a part of this module: it has an owner
        self._asked: tuple[Any, ...] = ()
        self._answer: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = (*args, *kwargs.items())
        if not kwargs and len(asked) == len(self._asked) and all(map(_same, asked, self._asked)):
            return self._answer
        answer = self._model(*args, **kwargs)
        self._asked, self._answer = (asked, answer) if not kwargs else ((), None)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)


def _same(a: Any, b: Any) -> bool:
    """The very same tensor, unchanged."""
    return a is b and isinstance(a, Tensor)
