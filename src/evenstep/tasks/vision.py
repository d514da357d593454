"""Image models by name: the residual networks of ours, and all of timm, which comes with the extra `vision`."""

import difflib
import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evenstep.errors import UserError
from evenstep.tasks import resnet

EXAMPLE = "vit_base_patch32_224"


def check_name(name: str, task: str) -> None:
    """Make sure that there is a model of that name; where one is ours and timm's, it is ours."""
    if name in resnet.NAMES:
        return
    timm = _timm()
    if timm is None:
        raise UserError(
            f"no model {name} for {task}; there are {', '.join(resnet.NAMES)} "
            "and, after pip install 'evenstep[vision]', any model of timm"
        )
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, {*resnet.NAMES, *timm.list_models()}, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(
            f"no model {name} for {task}; there are {', '.join(resnet.NAMES)} "
            f"and any model of timm, such as {EXAMPLE}{hint}"
        )


def image_size(name: str, own: int) -> tuple[int, int]:
    """Height and width that a model of that name takes; ours take the images' own."""
    if name in resnet.NAMES:
        return own, own
    timm = _timm()
    assert timm is not None
    found = timm.get_pretrained_cfg(name, allow_unregistered=True)
    height, width = found.input_size[1:] if found is not None else (224, 224)
    return int(height), int(width)


def make(name: str, classes: int) -> nn.Module:
    """A new model of that name."""
    if name in resnet.NAMES:
        model: nn.Module = resnet.resnet(name, classes)
    else:
        timm = _timm()
        assert timm is not None
        model = timm.create_model(name, pretrained=False, num_classes=classes)
    model.register_forward_pre_hook(_in_the_kind_of_its_weights)
    return model


def attention(device: torch.device) -> AbstractContextManager[Any]:
    """The context for images' short attention: on CPU, plain products of matrices go through it fastest.

    torch's own choice there is a kernel for long sequences: for the 50 patches of a ViT-B/32 its backward in
    bf16 takes a fifth of the whole step.
    """
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def _in_the_kind_of_its_weights(model: nn.Module, images: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Images that were bytes become float32; in a training in fp64 the model takes more."""
    weights = next(model.parameters(), None)  # a replica of DataParallel has none to show
    return images if weights is None else tuple(image.to(weights.dtype) for image in images)


def _timm() -> ModuleType | None:
    """The collection of image models, if it is installed."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name not in ("timm", "torchvision"):
            raise
        return None
