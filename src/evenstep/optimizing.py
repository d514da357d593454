"""Optimizers and schedules by name."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenstep.tasks.task import Optimizing

FUSED_ON = ("cpu", "cuda", "mps")


def make_optimizer(model: nn.Module, settings: Optimizing, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that the options name, in its fused form: one kernel instead of a dozen per parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = device.type in FUSED_ON
    lr, decay = settings.lr, settings.weight_decay
    match settings.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "sgd":
            fused = fused and not any(isinstance(p, DTensor) for p in parameters)  # torch has none for shards
            return torch.optim.SGD(parameters, lr=lr, weight_decay=decay, momentum=settings.momentum, fused=fused)
    raise ValueError(f"no optimizer {settings.optimizer}")


def lr_factor(schedule: str, step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by in a step: a pure function, so a resume needs no state."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    passed = (step - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return 1.0 - passed
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * passed))
    raise ValueError(f"no schedule {schedule}")
