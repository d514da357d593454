"""When the ranks of a training compare notes: about twice a second, and at the same moment on all of them."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

BEAT = 0.5  # seconds between two moments
MOST = 512  # steps between them at the most


def paced(steps: int, seconds: float) -> int:
    """How many such steps come to a beat."""
    return min(MOST, max(1, round(steps * BEAT / max(seconds, 1e-9))))


def exact(device: torch.device) -> torch.dtype:
    """What sums over ranks are made in."""
    return torch.float32 if device.type == "mps" else torch.float64


class Stops:
    """Whether any rank wishes to stop, found out at the same steps on all."""

    def __init__(self, wished: Callable[[], bool], device: torch.device, world: int) -> None:
        self._wished = wished
        self._device = device
        self._world = world
        self._steps, self._every, self._since = 0, 1, time.perf_counter()

    def wished(self) -> bool:
        """Ask after each step; the answer is no until it is time to compare notes."""
        self._steps += 1
        if self._steps < self._every:
            return False
        own = [time.perf_counter() - self._since, float(self._wished())]
        notes = torch.tensor(own, dtype=exact(self._device), device=self._device)
        if self._world > 1:
            dist.all_reduce(notes)
        seconds, wishes = notes.tolist()
        self._every = paced(self._steps, seconds / self._world)
        self._steps, self._since = 0, time.perf_counter()
        return bool(wishes > 0)
