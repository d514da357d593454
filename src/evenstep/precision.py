"""What fp32, bf16, fp16 and fp64 mean for a model's weights, its inputs and its computing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def stored(precision: str) -> torch.dtype:
    """The kind in which weights and inputs are kept."""
    return torch.float64 if precision == "fp64" else torch.float32


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the model computes."""
    half = HALF.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half)
