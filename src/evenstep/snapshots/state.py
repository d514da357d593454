"""A training's state as tensors and plain values by name, the same names under every strategy, and back."""

import base64
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, kw_only=True)
class State:
    """What a training learns: tensors, sharded where the model is, and the plain values among them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors: what a snapshot copies, and what a load fills."""
        return {name: value for name, value in self._all().items() if isinstance(value, Tensor)}

    def values(self) -> dict[str, Any]:
        """What is no tensor: numbers and flags of the optimizer's groups, and the scaler's."""
        plain = {name: _plain(value) for name, value in self._all().items() if not isinstance(value, Tensor)}
        return {**plain, "scaler": self.scaler.state_dict()}

    def take_over(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from these, which came from a snapshot and stand under the names that `tensors` has."""
        found = {**self._all(), **{name: value for name, value in values.items() if name != "scaler"}, **tensors}
        model = {name.removeprefix("model."): value for name, value in found.items() if _of_model(name)}
        optimizer = {
            name.removeprefix("optimizer."): value for name, value in found.items() if not _of_model(name)
        }
        set_model_state_dict(self.model, model)
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=FLAT)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(dict(values["scaler"]))

    def _all(self) -> dict[str, Any]:
        model = get_model_state_dict(self.model)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {
            **{f"model.{name}": value for name, value in model.items()},
            **{f"optimizer.{name}": value for name, value in optimizer.items()},
        }


def _of_model(name: str) -> bool:
    return name.startswith("model.")


def _plain(value: Any) -> Any:
    """As JSON keeps it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    raise TypeError(f"an optimizer that holds a {type(value).__name__} cannot be kept in a snapshot")


def generators(device: torch.device) -> dict[str, Any]:
    """The random states of this rank."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": _text(torch.get_rng_state()),
        "device": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [numpy_state["state"]["key"].tolist(), int(numpy_state["state"]["pos"])],
    }


def set_generators(found: Mapping[str, Any], device: torch.device) -> None:
    """Draw on from these random states."""
    torch.set_rng_state(_tensor(found["torch"]))
    if device.type == "cuda" and found["device"] is not None:
        torch.cuda.set_rng_state(_tensor(found["device"]), device)
    version, inner, gauss = found["python"]
    random.setstate((version, tuple(inner), gauss))
    key, position = found["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))


def _text(state: Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)
