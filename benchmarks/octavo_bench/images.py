"""What is timed beside language models: a training step of a ResNet, channels last.

Weights of convolutions and of the head are BF16, batch norms FP32. Convolutions are converted whether they gain or not,
so that the table says what they cost; `as planned` is what `octavo.convert` does by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.errors import ConfigError
from octavo.models.resnet import ResNet
from octavo.recipes import load
from octavo_bench.implementations import BF16, Implementation, implementations, precisions


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageWorkload:
    """The shape of a ResNet and of the batch that goes through it."""

    name: str
    """What results call it; `custom` where a field was given by hand."""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Bottlenecks of each stage."""
    width: int = 64
    """Channels inside those of the first stage."""
    classes: int = 1000
    """Outputs of the head."""
    size: int = 224
    """Pixels of an image's side."""
    batch: int = 256
    """Images a step."""

    @property
    def tokens(self) -> int:
        """Images a step: what results count a second."""
        return self.batch

    @property
    def pixels(self) -> int:
        """Output pixels of a convolution in the last stage but one, for predicted gains."""
        side = self.size >> len(self.depths)
        return self.batch * side * side

    @property
    def flops(self) -> int:
        """Model FLOPs of a step: three times those of the forward, convolutions and the head."""
        one: int = _forward_flops(replace(self, batch=1))
        return 3 * self.batch * one

    def make(self) -> ResNet:
        """Return a new model."""
        return ResNet(self.depths, self.width, self.classes)

    def implementations(self) -> dict[str, Implementation]:
        """Return what can compute it: BF16 and every recipe, and the default as it is planned by itself."""
        found = {name: one for name, one in implementations().items() if name == BF16 or name.startswith("octavo")}
        name = "octavo folded (as planned)"
        return found | {name: Implementation(name=name, convert=_as_planned, gemms=precisions(load("folded")))}

    def but(self, **fields: int | None) -> ImageWorkload:
        """Return this workload with another batch, named `custom`; itself where all fields are None.

        Raises:
            ConfigError: a field that only language models have.
        """
        given = {key: value for key, value in fields.items() if value is not None}
        if not given:
            return self
        if unknown := next((key for key in given if key != "batch"), None):
            raise ConfigError(f"--{unknown.replace('_', '-')}: {self.name} has no such field, only --batch.")
        if given["batch"] < 1:
            raise ConfigError("--batch must be positive.")
        return replace(self, batch=given["batch"], name="custom")


IMAGE_WORKLOADS = {
    workload.name: workload
    for workload in (
        ImageWorkload(name="resnet50"),
        ImageWorkload(name="tiny-resnet", depths=(1, 1), width=32, classes=16, size=32, batch=2),
    )
}
"""By name: ResNet-50 on 256 images of ImageNet's size, and one for tests."""


def _as_planned(model: nn.Module, pixels: int) -> None:
    octavo.convert(model, "folded", tokens=pixels, strict=True)


@cache
def _forward_flops(workload: ImageWorkload) -> int:
    with torch.device("meta"):
        model, image = workload.make(), torch.empty(workload.batch, 3, workload.size, workload.size)
    with FlopCounterMode(display=False) as counter:
        model(image)
    return int(counter.get_total_flops())
