"""A ResNet of bottlenecks (arXiv 1512.03385, section 4.1), with strides in the 3x3 convolutions: ResNet-50 by default.

Shapes: B images, C channels, H and W pixels. Convert the model and its input to channels last, by
`to(memory_format=torch.channels_last)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4
"""Ratio of output channels to inner channels of a bottleneck."""


class ResNet(nn.Module):
    """An image classifier."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        """Create the layers.

        Args:
            depths: bottlenecks per stage; every stage but the first halves the image and doubles the channels.
            width: inner channels of the first stage's bottlenecks.
        """
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.layers = nn.ModuleList()
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                inner = width * 2**stage
                self.layers.append(Bottleneck(channels, inner, stride=2 if stage > 0 and block == 0 else 1))
                channels = EXPANSION * inner
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, 3, H, W)."""
        x = self.stem(images)
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """Residual block of 1x1 down, 3x3 and 1x1 up convolutions, each with a batch norm."""

    def __init__(self, channels: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        outer = EXPANSION * inner
        self.down, self.norm1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.up, self.norm3 = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4 inner, H / stride, W / stride) for x (B, C, H, W)."""
        y = self.norm1(self.down(x)).relu()
        y = self.norm2(self.conv(y)).relu()
        y = self.norm3(self.up(y))
        result: Tensor = (y + self.shortcut(x)).relu()
        return result
