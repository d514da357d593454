"""The contract of a strategy: who holds the model, and how the ranks' gradients become one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from evenstep.strategies.batchnorm import EvenBatchNorm


class Strategy(ABC):
    """A model on its device, or devices.

    The loop hands each rank's loss over as `sum(losses) * world / samples_in_the_global_step`; whatever a
    strategy does to the gradients, it ends with the mean over ranks, which is the gradient of the exact mean.
    """

    model: nn.Module
    """The user's model; its parameters are what the optimizer updates."""

    called: nn.Module
    """What the loop calls: the model, or what stands in front of it."""

    def __init__(self, model: nn.Module, rank: int, world: int, device: torch.device) -> None:
        self.model = model
        self.called = model
        self.rank = rank
        self.world = world
        self.device = device
        self._even_norms = [part for part in model.modules() if isinstance(part, EvenBatchNorm)]
        self._own_norms = [part for part in model.modules() if _sees_own_samples(part)]
        self._resting: list[nn.Module] = []

    @property
    def parameters(self) -> int:
        """How many numbers the model has to learn."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @abstractmethod
    def syncing(self, sync: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged if `sync`, else kept for later."""

    def count(self, counts: bool) -> None:
        """Say whether the coming samples count: those of a rank without samples are for keeping step only."""
        for even in self._even_norms:
            even.counts = counts
        if counts:
            for norm in self._resting:
                norm.train()
            self._resting = []
        elif not self._resting:  # a BatchNorm would learn from the sample, or refuse to, as it is a single one
            self._resting = [norm for norm in self._own_norms if norm.training]
            for norm in self._resting:
                norm.eval()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to this norm, and return the norm it had."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full

    def settle(self) -> None:
        """Make the buffers the same on all ranks: what BatchNorm gathered is averaged, the rest is rank 0's."""
        if self.world == 1:
            return
        averaged = set()
        for part in self.model.modules():
            if not isinstance(part, _NormBase) or isinstance(part, EvenBatchNorm):
                continue
            for buffer in (part.running_mean, part.running_var):
                if buffer is not None:
                    dist.all_reduce(buffer)
                    buffer /= self.world
                    averaged.add(id(buffer))
        for buffer in self.model.buffers():
            if id(buffer) not in averaged:
                dist.broadcast(buffer, src=0)

    def own_buffers(self) -> set[str]:
        """The names of the buffers that differ from rank to rank until `settle`: what BatchNorms have gathered."""
        if self.world == 1:
            return set()
        own = {id(buffer) for norm in self._own_norms for buffer in norm.buffers(recurse=False)}
        named = self.model.named_buffers(remove_duplicate=False)
        return {name for name, buffer in named if id(buffer) in own}

    def finite(self) -> bool:
        """Whether all weights and buffers are finite numbers. Every rank has to ask."""
        parts = [local(part.detach()) for part in (*self.model.parameters(), *self.model.buffers())]
        found = not_finite([part for part in parts if part.is_floating_point()])
        if self.world > 1:
            dist.all_reduce(found)
        return not bool(found)

    def weights(self) -> dict[str, Tensor]:
        """All weights and buffers by their names in the user's model, whole, on the CPU of rank 0.

        Every rank has to ask; all but rank 0 may get nothing.
        """
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(dict[str, Tensor], get_model_state_dict(self.model, options=whole))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights that rank 0 has, whole; every rank has to ask."""
        several = self.world > 1
        set_model_state_dict(
            self.model,
            dict(weights) if self.rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=several),
        )


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """1 where a number in these is not finite, else 0; on their device, so that nobody waits for it."""
    largest = nn.utils.get_total_norm(tensors, math.inf)
    return (~largest.isfinite()).float()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sees_own_samples(part: nn.Module) -> bool:
    """Whether it gathers statistics of this rank's samples alone."""
    return isinstance(part, _NormBase) and not isinstance(part, EvenBatchNorm | nn.SyncBatchNorm)


def units_of(model: nn.Module, named: Iterable[nn.Module] | None) -> list[nn.Module]:
    """The parts that are sharded and gathered by themselves: those the task names, else repeated blocks.

    Blocks that follow each other in a ModuleList or Sequential are what models repeat; gathering one at a
    time keeps the memory for gathered weights down to one block. Parts of a part come before it, as
    `fully_shard` wants them.
    """
    chosen = set(_blocks(model) if named is None else named)
    return [part for part in reversed(list(model.modules())) if part in chosen and part is not model]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            for block in part:
                called = not isinstance(block, nn.ModuleList | nn.ModuleDict)  # those only hold others
                if called and has_parameters(block) and any(True for _ in block.children()):
                    yield block


def has_parameters(part: nn.Module) -> bool:
    """Whether there is anything to learn in it."""
    return any(True for _ in part.parameters())
