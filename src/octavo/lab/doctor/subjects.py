"""Subjects of an examination: a machine, and a model that can make steps on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo._util.config_reader import to_dict
from octavo._util.rng import untouched_generators
from octavo.conversion import convert, disabled
from octavo.errors import UnsupportedError
from octavo.lab.train import RunConfig
from octavo.lab.train.opening import open_run, open_subject
from octavo.lab.train.subject import Subject, to_device
from octavo.nn import Conv1d, Conv2d
from octavo.nn.linear import LinearLayer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine to examine."""

    device: torch.device
    folder: Path = Path()
    """Directory that runs are written to."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A model with a loss and a training step that leaves its weights unchanged."""

    model: nn.Module
    """Model with layers in FP8."""
    loss: Callable[[], Tensor]
    """Computes the loss of one fixed batch, with its autograd graph; shape ()."""
    step: Callable[[], Any]
    """Runs a full training step on that batch: forward, backward, and the optimizer if there is one."""
    trace: Path | None = None
    """Directory for a trace of a few steps."""
    corpus: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of the text; empty without one."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def layers(self) -> dict[str, LinearLayer | Conv1d | Conv2d]:
        """Layers in FP8, by name."""
        found = self.model.named_modules()
        return {name: m for name, m in found if isinstance(m, LinearLayer | Conv1d | Conv2d) and m.recipe.is_fp8}

    def seeded(self, compute: Callable[[], T]) -> T:
        """Return a result computed with a fixed random seed."""
        with untouched_generators():
            torch.manual_seed(0)
            return compute()

    def in_both(self, compute: Callable[[], T]) -> tuple[T, T]:
        """Return a result in FP8 and in high precision, with the same random seed."""
        fp8 = self.seeded(compute)
        with disabled(self.model):
            return fp8, self.seeded(compute)

    @torch.no_grad()
    def loss_value(self) -> float:
        """Return the loss as a number."""
        return float(self.loss())

    def gradients(self, wanted: Collection[str]) -> dict[str, Tensor]:
        """Return the gradients of some parameters after one backward, then clear them all."""
        self.model.zero_grad(set_to_none=True)
        try:
            self.loss().backward()
            named = self.model.named_parameters()
            return {name: p.grad for name, p in named if name in wanted and p.grad is not None}
        finally:
            self.model.zero_grad(set_to_none=True)


def a_gpu(subject: Machine | Trial) -> str:
    """Requirement of a check (see `octavo.lab.doctor.check.Need`): a GPU."""
    return "" if subject.device.type == "cuda" else "the device is a CPU"


def fp8_layers(trial: Trial) -> str:
    """Requirement of a check: a layer in FP8."""
    return "" if trial.layers else "no layer is in FP8; octavo plan gives the reason per layer"


def trial_of_config(config: RunConfig, *, trace: Path | None = None) -> Trial:
    """Return a trial of the FP8 model of a run, with the weights of its newest checkpoint if it has one.

    The BF16 baseline is left out. A learning rate of zero leaves the weights unchanged.

    Raises:
        CheckpointError, ConfigError, DataError: as `octavo train`.
        UnsupportedError: the run trains in BF16 only.
    """
    graph = "auto" if config.run.graph == "on" else config.run.graph  # the machine may have no GPU
    setup = open_run(config.with_run(baseline=False, graph=graph)).setup()
    if setup.plan is None:
        raise UnsupportedError("the run trains in BF16 only: there are no FP8 layers to check.")
    state, run = setup.states[0], setup.config.run
    inputs_BT, targets_BT = (part.to(setup.device) for part in next(setup.loader))
    first = [part.chunk(run.accumulate)[0] for part in (inputs_BT, targets_BT)]

    def loss() -> Tensor:
        return state.loss(*first)

    def step() -> None:
        state.step(inputs_BT, targets_BT, step=1, lr=0.0, accumulate=run.accumulate)

    return Trial(state.model, loss, step, trace, {**to_dict(setup.corpus), **to_dict(setup.statistics)})


def trial_of_file(file: Path, *, recipe: str | None, device: torch.device, trace: Path | None = None) -> Trial:
    """Return a trial of a Python file or a Hugging Face config (`octavo.lab.train.opening.open_subject`), on one batch.

    It computes under BF16 autocast. A model without FP8 layers is converted to `recipe`, None for the default. The step
    is a forward and a backward.

    Raises:
        ConfigError, DataError, UnsupportedError: as `open_subject`.
        NonFiniteError: a weight to convert contains a NaN or an infinity.
    """
    subject = open_subject(file)
    trial = trial_of(subject.build().to(device), subject, trace)
    if not trial.layers:
        convert(trial.model, recipe, allow_reference=True)  # the check 'kernels' reports that
    return trial


def trial_of(model: nn.Module, subject: Subject, trace: Path | None = None) -> Trial:
    """Return a trial of a model under BF16 autocast on the first batch of a subject; its step has no optimizer."""
    device = next(model.parameters()).device
    batch = to_device(next(subject.batches()), device)

    def loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return subject.loss(model, batch)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()
        model.zero_grad(set_to_none=True)

    return Trial(model, loss, step, trace)
