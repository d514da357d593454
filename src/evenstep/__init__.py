"""Train a PyTorch model on any number of processes, with the same result on each."""

from typing import TYPE_CHECKING, Any

from evenstep import torchvision_ops

if TYPE_CHECKING:
    from evenstep.api import Result, train
    from evenstep.errors import UserError
    from evenstep.order.sampler import EvenSampler
    from evenstep.tasks.task import Batch, Columns, Draw, Optimizing, Task, full_precision

__version__ = "0.1.0"

torchvision_ops.install()

# loaded when first asked for: `import evenstep` and `evenstep --help` do not load torch
_PLACES = {
    "Batch": "evenstep.tasks.task",
    "Columns": "evenstep.tasks.task",
    "Draw": "evenstep.tasks.task",
    "EvenSampler": "evenstep.order.sampler",
    "Optimizing": "evenstep.tasks.task",
    "Result": "evenstep.api",
    "Task": "evenstep.tasks.task",
    "UserError": "evenstep.errors",
    "full_precision": "evenstep.tasks.task",
    "train": "evenstep.api",
}

__all__ = [
    "Batch",
    "Columns",
    "Draw",
    "EvenSampler",
    "Optimizing",
    "Result",
    "Task",
    "UserError",
    "__version__",
    "full_precision",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
