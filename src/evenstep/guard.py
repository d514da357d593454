"""Leaves a step out, on all ranks alike, when its losses or gradients are not finite: for `--on-nan skip`.

It has to be found out before the update, so each step waits for the device and for the other ranks, and the
buffers, where a BatchNorm gathers what it sees, are copied before it.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.strategies.strategy import Strategy, local, not_finite


class Guard:
    """Looks at each step of a model's training."""

    def __init__(self, strategy: Strategy, scaler: torch.amp.GradScaler) -> None:
        self.strategy = strategy
        self.left_out: list[list[int]] = []
        """For each such step, the ranks whose losses were not finite; none where only its gradients were not."""
        self._scales = scaler.is_enabled()  # then gradients may overflow: the scaler leaves those steps out
        self._before: list[Tensor] = []

    def remember(self) -> None:
        """A step begins."""
        self._before = [buffer.clone() for buffer in self.strategy.model.buffers()]

    def refuses(self, losses: Tensor) -> bool:
        """Whether this step must be left out, by its losses' sum and its gradients. Every rank has to ask."""
        flags = torch.zeros(self.strategy.world + 1, device=losses.device)
        flags[self.strategy.rank] = ~losses.isfinite()
        if not self._scales:
            gradients = [local(p.grad) for p in self.strategy.model.parameters() if p.grad is not None]
            flags[-1] = not_finite(gradients)
        if self.strategy.world > 1:
            dist.all_reduce(flags)
        *ranks, gradients_too = flags.tolist()
        bad = [rank for rank, flag in enumerate(ranks) if flag]
        if not bad and not gradients_too:
            return False
        self.left_out.append(bad)
        for buffer, before in zip(self.strategy.model.buffers(), self._before, strict=True):
            buffer.copy_(before)
        return True
