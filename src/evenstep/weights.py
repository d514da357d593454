"""Weights as files: by name, whole, as safetensors, which hold nothing that could run."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.errors import UserError
from evenstep.files import replacing
from evenstep.ranks import agreed
from evenstep.strategies.strategy import Strategy
from evenstep.world import World


class NotKept(Exception):
    """The weights could not be written, and why; what was there before still is."""


def keep(strategy: Strategy, path: Path) -> None:
    """The weights as they are now. Every rank has to ask, and hears of it where they cannot be kept."""
    weights = strategy.weights()
    if trouble := agreed(lambda: _trouble(weights, path), World(strategy.rank, strategy.world)):
        raise NotKept(f"{path} cannot be written: {trouble}")


def take(strategy: Strategy, path: Path) -> None:
    """Take over weights that were kept. Every rank has to ask; rank 0 reads."""
    weights = read(path) if strategy.rank == 0 else {}
    try:
        strategy.load(weights)
    except RuntimeError as error:
        raise UserError(f"{path} holds another model's weights: {' '.join(str(error).split()):.300}") from None


def read(path: Path) -> dict[str, Tensor]:
    """What a file of weights holds; a UserError where it is none."""
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as weights: {error}") from None
    return found


def intact(path: Path) -> bool:
    """Whether there is such a file, as long as it says it is."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _trouble(weights: Mapping[str, Tensor], path: Path) -> str:
    try:
        with replacing(path) as temporary:
            save_file(_apart(weights), temporary)
    except (OSError, SafetensorError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that share memory with another: safetensors takes each tensor for itself."""
    seen: set[int] = set()
    found = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found
