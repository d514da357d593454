"""Exact metrics over ranks: each rank measures its own samples, once; then the states of all ranks are merged."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from evenstep.errors import UserError


class Mean(Metric):
    """The mean of the losses, each sample counted once."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor) -> None:
        """Take in one loss per sample."""
        self.total += losses.detach().sum(dtype=torch.float64).to(self.total.device)
        self.count += losses.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


def local(metrics: Mapping[str, Metric], device: torch.device) -> dict[str, Metric]:
    """Fresh copies on the device; they take in this rank's samples until they are merged."""
    copies = {name: copy.deepcopy(metric) for name, metric in metrics.items()}
    for name, metric in copies.items():
        if not metric.sync_on_compute:
            raise UserError(f"metric {name} has sync_on_compute=False, so it would speak of one rank's samples")
        metric.reset()
        metric.to(device)
    return copies


def merged(metrics: Mapping[str, Metric], world: int) -> dict[str, Any]:
    """The metrics' values over all ranks' samples; rank 0's, lest two ranks' last digits decide differently."""
    values = [{name: _merged(metric, world) for name, metric in metrics.items()}]
    if world > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _merged(metric: Metric, world: int) -> Any:
    metric.to("cpu")
    for part in metric.modules():
        if isinstance(part, Metric):
            part.dist_sync_fn = _gather
            part.distributed_available_fn = (lambda: True) if world > 1 else (lambda: False)
    with warnings.catch_warnings():  # a rank without samples computes from those of the others
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        return _plain(metric.compute())


def _gather(state: Tensor, group: Any) -> list[Tensor]:
    """A state of every rank, in rank order, but for the empty ones of ranks without samples.

    Theirs have the wrong dtype, which breaks torchmetrics' own gathering (and sizes differ anyway).
    """
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, state, group=group)
    return [other for other in states if other.numel()] or states[:1]


def _plain(value: Any) -> Any:
    """Numbers and lists, as a record keeps them."""
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value
