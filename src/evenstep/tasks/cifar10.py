"""Small colour images of ten kinds of things (Krizhevsky, 2009): which one is it?"""

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from evenstep import world
from evenstep.errors import UserError
from evenstep.order import hashing
from evenstep.order.permutation import Permutation
from evenstep.tasks import resnet, sources, tables, vision
from evenstep.tasks.task import Columns, Draw, Task, full_precision

VERSION = 1
SIDE, CLASSES = 32, 10
BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
IN_BATCH = 10_000
PARTS = {"train": slice(0, 45_000), "validation": slice(45_000, 50_000), "test": slice(50_000, 60_000)}

# of the colours in the training part, out of 255
MEAN = (125.2, 122.8, 113.9)
DEVIATION = (63.0, 62.1, 66.7)
PADDING = 4  # how far a random crop goes over the edge


@dataclass(frozen=True, kw_only=True)
class Cifar10(Task):
    """Trained on 45,000 images, with 5,000 for validation; the test batch is the publisher's."""

    models: ClassVar = resnet.NAMES
    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 30,
        "global_batch": 128,
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.05,
        "schedule": "cosine",
        "warmup_steps": 200,
    }
    goal: ClassVar[str] = "max accuracy"

    model_name: str = "resnet18"
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        vision.check_name(self.model_name, "cifar10")

    def data(self, split: str) -> Columns:
        home = self.data_dir or world.data_home()
        files = [sources.need("cifar10", home) / name for name in BATCHES]
        table = tables.table("cifar10", VERSION, files, partial(parse, files), home)
        return Columns(image=table["image"][PARTS[split]], label=table["label"][PARTS[split]])

    def model(self) -> nn.Module:
        return vision.make(self.model_name, CLASSES)

    def units(self, model: nn.Module) -> Iterable[nn.Module] | None:
        return [part for part in model.modules() if isinstance(part, resnet.Block)] or None

    def prepare(self, batch: dict[str, Tensor], draw: Draw | None) -> dict[str, Tensor]:
        """Crop and flip while the images are small and bytes; only then make them what the model takes."""
        image = batch["image"]
        if draw is not None:
            image = crop_and_flip(
                image,
                down=draw.integers("down", 0, 2 * PADDING + 1),
                right=draw.integers("right", 0, 2 * PADDING + 1),
                flip=draw.uniform("flip") < 0.5,
            )
        image = normalise(image.contiguous(memory_format=torch.channels_last))
        if self._size != (SIDE, SIDE):
            image = F.interpolate(image, self._size, mode="bilinear", align_corners=False)
        return {**batch, "image": image}

    @cached_property
    def _size(self) -> tuple[int, int]:
        return vision.image_size(self.model_name, SIDE)

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(_logits(model, batch["image"]), batch["label"], reduction="none")

    def metrics(self) -> Mapping[str, Metric]:
        return {
            "accuracy": MulticlassAccuracy(num_classes=CLASSES, average="micro"),
            "top_5": MulticlassAccuracy(num_classes=CLASSES, average="micro", top_k=5),
        }

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return _logits(model, batch["image"]), batch["label"]


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with vision.attention(images.device):
        return full_precision(model(images))


# On the device, by the batch


def crop_and_flip(images: Tensor, *, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
    """Each image moved within a black margin, and mirrored where `flip` says so; in one gather."""
    count, _, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    rows = down[:, None] + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = right[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    which = torch.arange(count, device=images.device)
    picked = padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def normalise(images: Tensor) -> Tensor:
    """Bytes to numbers of mean 0 and variance 1, over the training part."""
    mean, deviation = (torch.tensor(c, device=images.device).view(1, 3, 1, 1) for c in (MEAN, DEVIATION))
    return (images - mean) / deviation


# From the published files to columns


def parse(files: list[Path]) -> tables.Table:
    """All images and labels; those for training in a fixed random order, whose end is for validation."""
    read = [read_batch(path) for path in files]
    images = np.concatenate([images for images, _ in read])
    labels = np.concatenate([labels for _, labels in read])
    order = np.arange(len(labels))
    learnt = PARTS["test"].start
    order[:learnt] = Permutation(learnt, hashing.key("cifar10")).block(0, learnt)
    return {"image": images[order], "label": labels[order]}


def read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A published batch, which is a pickle: anything in it but plain data and one array is refused."""
    try:
        with path.open("rb") as file:
            content = _Plain(file, encoding="bytes").load()
        data = content[b"data"]
        labels = np.array(content[b"labels"], dtype=np.int64)
        if data.shape != (IN_BATCH, 3 * SIDE * SIDE) or data.dtype != np.uint8 or labels.shape != (IN_BATCH,):
            raise ValueError(f"it holds {data.shape} of {data.dtype} and {labels.shape} labels")
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(
            f"{path} is not one of the published batches ({error}); move {path.parent} out of the way "
            "and run `evenstep data get cifar10`"
        ) from None
    return data.reshape(IN_BATCH, 3, SIDE, SIDE), labels


class _Plain(pickle.Unpickler):
    """Builds what an array of numbers is made of, and calls nothing else."""

    _reconstruct: ClassVar = np.empty(0).__reduce__()[0]
    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.allowed[module, name]
