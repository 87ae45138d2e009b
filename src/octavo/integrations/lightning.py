"""Training by Lightning in FP8: `Trainer(plugins=OctavoPrecision())`, or `Fabric(plugins=FabricPrecision())`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins import MixedPrecision as FabricMixed
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from octavo.conversion import Plan, Policy, convert
from octavo.recipes import RecipeLike


class _Converting:
    """Mixin for a plugin of mixed precision: FP32 parameters, FP8 linear layers, BF16 autocast for all else.

    The model is converted before it moves to its device and is wrapped; parameters are the same objects. Checkpoints
    hold the model as it was.
    """

    plan: Plan | None = None
    """What was converted."""

    def __init__(
        self, recipe: RecipeLike = "folded", policy: Policy | None = None, *, device: str | None = None
    ) -> None:
        """Take what `octavo.convert` takes.

        Args:
            device: the type of device that the model runs on, by default `cuda` where there is one, else `cpu`.
        """
        super().__init__("bf16-mixed", device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[call-arg]
        self.recipe, self.policy = recipe, policy

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the linear layers of a module in place."""
        device: Any = self.device  # type: ignore[attr-defined]
        self.plan = convert(module, self.recipe, policy=self.policy, device=device)
        return module


class OctavoPrecision(_Converting, MixedPrecision):
    """Precision plugin of `lightning.Trainer`."""


class FabricPrecision(_Converting, FabricMixed):
    """Precision plugin of `lightning.Fabric`."""
