"""What is examined: a machine, a model that can make steps on it, the record of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.conversion import disabled
from octavo.generators import untouched_generators
from octavo.nn import Conv1d, Conv2d, Linear
from octavo.train import device as devices


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs."""

    device: torch.device
    folder: Path = Path()
    """Where runs are written."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment variables in force."""

    @classmethod
    def here(cls, device: str = "auto", folder: Path = Path()) -> Machine:
        """Return this machine.

        Raises:
            ConfigError: there is no such device.
        """
        return cls(devices.resolve(device), folder)


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, and what it takes to make a step of it. No step changes a weight."""

    model: nn.Module
    """With layers in FP8."""
    loss: Callable[[], Tensor]
    """Computes the loss of one batch, always the same, with a graph to go back through; shape ()."""
    step: Callable[[], Any]
    """Makes a whole training step on that batch: forward, backward, and the optimizer where there is one."""
    trace: Path | None = None
    """Directory for a trace of a few steps."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def layers(self) -> dict[str, Linear | Conv1d | Conv2d]:
        """Its layers in FP8, by name."""
        found = self.model.named_modules()
        return {name: m for name, m in found if isinstance(m, Linear | Conv1d | Conv2d) and m.recipe.is_fp8}

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the loss in FP8 and in high precision, with the same random numbers in both; shape ()."""
        with untouched_generators(), torch.no_grad():
            torch.manual_seed(0)
            fp8 = self.loss()
            torch.manual_seed(0)
            with disabled(self.model):
                return fp8, self.loss()

    def gradients(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return the gradients of some parameters after one backward, and leave none behind."""
        self.model.zero_grad(set_to_none=True)
        try:
            self.loss().backward()
            named = self.model.named_parameters()
            return {name: p.grad for name, p in named if name in wanted and p.grad is not None}
        finally:
            self.model.zero_grad(set_to_none=True)


def a_gpu(subject: Machine | Trial) -> str:
    """What a check can need (`octavo.doctor.check.Need`): that it runs on a GPU."""
    return "" if subject.device.type == "cuda" else "this is a CPU"


def fp8_layers(trial: Trial) -> str:
    """What a check can need: a layer in FP8."""
    return "" if trial.layers else "no layer is in FP8: the plan says why (octavo plan)"
