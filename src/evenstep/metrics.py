"""Exact metrics over ranks: each rank measures its own samples, once; then the states of all ranks are merged."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean
from torchmetrics.wrappers import BootStrapper, Running

from evenstep.errors import UserError

DEPENDS_ON_RANKS = (BootStrapper, Running)


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
    copies = {}
    for name, metric in metrics.items():
        _check(name, metric)
        copies[name] = copy.deepcopy(metric).to(device)
        copies[name].reset()
    return copies


def _check(name: str, metric: Any) -> None:
    """Refuse what cannot be exact over ranks."""
    if not isinstance(metric, Metric):
        raise UserError(
            f"metric {name} is a {type(metric).__name__}, not a torchmetrics.Metric; of a collection, "
            "give each metric a name of its own"
        )
    for part in _parts(metric):
        if not part.sync_on_compute:
            raise UserError(f"metric {name} has sync_on_compute=False, so it would speak of one rank's samples")
        if isinstance(part, DEPENDS_ON_RANKS):
            raise UserError(
                f"metric {name} uses {type(part).__name__}, whose value depends on how samples are split into "
                "batches and ranks; take a metric without it"
            )


def merged(metrics: Mapping[str, Metric], world: int) -> dict[str, Any]:
    """The metrics' values over all ranks' samples; rank 0's, lest two ranks' last digits decide differently."""
    for metric in metrics.values():
        metric.to("cpu")
    if world == 1:
        return {name: _computed(metric) for name, metric in metrics.items()}
    parts = [part for metric in metrics.values() for part in _parts(metric)]
    taken = [(part.update_called, part.metric_state) for part in parts]
    leads = dist.get_rank() == 0
    everyones: list[Any] | None = [None] * world if leads else None
    dist.gather_object(taken, everyones)
    values: list[Any] = [None]
    if everyones is not None:
        for part, *of_ranks in zip(parts, *everyones, strict=True):
            _merge(part, [state for called, state in of_ranks if called])
        values = [{name: _computed(metric) for name, metric in metrics.items()}]
    dist.broadcast_object_list(values)
    found: dict[str, Any] = values[0]
    return found


def _parts(metric: Metric) -> list[Metric]:
    """The metric and those it is made of."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _merge(metric: Metric, states: list[dict[str, Any]]) -> None:
    """Put the states of all ranks that had samples together, as torchmetrics' own gathering does.

    Theirs waits for good where ranks have lists of different lengths, or one has none.
    """
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        if len(values) > 1 and isinstance(values[0], list):
            values = [[part for value in values for part in value]]
        elif len(values) > 1:
            values = [_reduced(metric, name, torch.stack(values), reduction)]
        if values:
            setattr(metric, name, values[0])


def _reduced(metric: Metric, name: str, stacked: Tensor, reduction: Any) -> Tensor:
    if reduction is dim_zero_mean:  # of a constant, such as a range of values, it is the constant
        if (stacked != stacked[0]).any():
            raise UserError(
                f"{type(metric).__name__} takes the mean over ranks of its {name}, as if each had as many "
                "samples; keep a sum and a count (dist_reduce_fx='sum') instead"
            )
        return stacked[0]
    return reduction(stacked) if callable(reduction) else stacked


def _computed(metric: Metric) -> Any:
    for part in _parts(metric):
        part.distributed_available_fn = _not_distributed  # it holds all ranks' samples by now
    with warnings.catch_warnings():  # rank 0 may have had no samples itself
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        return _plain(metric.compute())


def _not_distributed() -> bool:
    return False


def _plain(value: Any) -> Any:
    """Numbers and lists, as a record keeps them."""
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
