"""Lets torchvision be imported beside a torch without CUDA.

The torchvision of the package index is built for CUDA. Beside a CPU build of torch its compiled part does not
load, and importing it ends in "operator torchvision::nms does not exist", which takes timm and torchmetrics
with it. Declaring the missing operators is enough for all that is written in Python: transforms, models, timm.
Where torchvision imports as it is, nothing is changed.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MISSING = ("nms", "qnms")


def install() -> None:
    """From now on `import torchvision` works here; torch itself is not loaded by this."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as the real one does, and once more with the operators declared if that fails for want of them."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self.real.exec_module(module)
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            _declare()
            self.real.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)  # what else a loader can: reading resources, showing the source


def _declare() -> None:
    library = importlib.import_module("torch.library")
    for name in MISSING:
        library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
