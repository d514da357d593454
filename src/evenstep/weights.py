"""Weights as files: by name, whole, as safetensors, which hold nothing that could run."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.files import replacing
from evenstep.strategies.strategy import Strategy


def keep(strategy: Strategy, path: Path) -> None:
    """The weights as they are now. Every rank has to ask."""
    weights = strategy.weights()
    if strategy.rank == 0:
        with replacing(path) as temporary:
            save_file(_apart(weights), temporary)


def take(strategy: Strategy, path: Path) -> None:
    """Take over weights that were kept. Every rank has to ask; rank 0 reads."""
    strategy.load(load_file(path) if strategy.rank == 0 else {})


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that share memory with another: safetensors takes each tensor for itself."""
    seen: set[int] = set()
    found = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found
