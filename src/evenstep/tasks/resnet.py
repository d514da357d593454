"""Residual networks (He et al., 2015) with the stem for small images: three by three, and no pooling."""

import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
WIDTHS = (64, 128, 256, 512)
NAMES = tuple(f"resnet{depth}" for depth in DEPTHS)


def resnet(name: str, classes: int) -> nn.Sequential:
    """The network of that name."""
    depth = int(name.removeprefix("resnet"))
    stages = []
    width_in = WIDTHS[0]
    for stage, (blocks, width) in enumerate(zip(DEPTHS[depth], WIDTHS, strict=True)):
        made = []
        for block in range(blocks):
            made.append(Block(width_in, width, 2 if stage and not block else 1, bottleneck=depth >= 50))
            width_in = made[-1].width_out
        stages.append(nn.Sequential(*made))
    network = nn.Sequential(
        *_conv(3, WIDTHS[0], 3),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width_in, classes),
    )
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return network


class Block(nn.Module):
    """What a few convolutions add to their input; nothing, to begin with."""

    def __init__(self, width_in: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.width_out = 4 * width if bottleneck else width
        if bottleneck:
            steps = [
                *_conv(width_in, width, 1),
                nn.ReLU(),
                *_conv(width, width, 3, stride),
                nn.ReLU(),
                *_conv(width, self.width_out, 1),
            ]
        else:
            steps = [*_conv(width_in, width, 3, stride), nn.ReLU(), *_conv(width, width, 3)]
        nn.init.zeros_(steps[-1].weight)  # type: ignore[arg-type]
        self.added = nn.Sequential(*steps)
        self.kept = nn.Sequential()
        if stride > 1 or width_in != self.width_out:
            self.kept = nn.Sequential(*_conv(width_in, self.width_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.kept(x) + self.added(x))


def _conv(width_in: int, width_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size but for the stride, and its normalisation."""
    return [
        nn.Conv2d(width_in, width_out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(width_out),
    ]
