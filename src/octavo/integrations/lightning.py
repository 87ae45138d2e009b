"""Training by Lightning in FP8: `Trainer(plugins=OctavoPrecision())`, or `Fabric(plugins=FabricPrecision())`.

`Trainer(plugins=OctavoPrecision(), callbacks=LastShare())` computes the last share of the steps by another recipe.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import MixedPrecision as FabricMixed
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from octavo.conversion import Plan, Policy, convert
from octavo.errors import ConfigError
from octavo.integrations.recipe_switch import RecipeSwitch
from octavo.recipes import RecipeLike


class _Converting:
    """Mixin for a plugin of mixed precision: FP32 parameters, FP8 linear layers, BF16 autocast for all else.

    The model is converted before it moves to its device and is wrapped; parameters are the same objects. Checkpoints
    hold the model as it was.
    """

    plan: Plan | None = None
    """Conversion plan."""

    def __init__(
        self, recipe: RecipeLike | None = None, policy: Policy | None = None, *, device: str | None = None
    ) -> None:
        """Take what `octavo.convert` takes.

        Args:
            device: the type of device that the model runs on, by default `cuda` where there is one, else `cpu`.
        """
        super().__init__("bf16-mixed", device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[call-arg]
        self.recipe, self.policy = recipe, policy

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the linear layers of a module in place."""
        self.convert_to(module, self.recipe)
        return module

    def convert_to(self, module: nn.Module, recipe: RecipeLike | None) -> Plan:
        """Convert a module, which may be converted already, to a recipe in place; return the plan."""
        device: Any = self.device  # type: ignore[attr-defined]
        self.plan = convert(module, recipe, policy=self.policy, device=device)
        return self.plan


class OctavoPrecision(_Converting, MixedPrecision):
    """Precision plugin of `lightning.Trainer`."""


class FabricPrecision(_Converting, FabricMixed):
    """Precision plugin of `lightning.Fabric`."""


class LastShare(lightning.Callback):
    """Conversion of a model of `OctavoPrecision` to another recipe for the last share of the optimizer steps."""

    def __init__(self, share: float = 0.3, recipe: RecipeLike = "rowwise_bf16_fprop") -> None:
        """Take that share, from 0 to 1, and its recipe: by default with fprop in BF16."""
        self._switch = RecipeSwitch(share, recipe)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Check before the first step that the change is possible.

        Raises:
            ConfigError: another precision plugin, a run without a last step, weights in FP8, or an unknown recipe.
            UnsupportedError: the device cannot run the recipe, or the model is sharded so that it cannot change.
        """
        self._plugin, self._steps = trainer.precision_plugin, trainer.estimated_stepping_batches
        if not isinstance(self._plugin, OctavoPrecision):
            raise ConfigError(
                "LastShare: the model is not converted by OctavoPrecision. Pass plugins=OctavoPrecision()."
            )
        if not 0 < self._steps < float("inf"):
            raise ConfigError("LastShare: the run has no last step. Give the trainer max_steps.")
        self._switch.rehearse(pl_module, self._plugin.recipe, partial(self._plugin.convert_to, pl_module))

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Convert at the first step of the share, or of a run that resumes inside it."""
        if self._switch.is_due(trainer.global_step, int(self._steps)):
            self._plugin.convert_to(pl_module, self._switch.last_recipe)
