"""Where a trial comes from: a configuration, with the weights that its run has reached, or a function of the user's."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.conversion import convert
from octavo.doctor.subjects import Trial
from octavo.errors import ConfigError, UnsupportedError
from octavo.train import RunConfig, checkpoint, load_run
from octavo.train.setup import Setup, set_up


def of_config(config: RunConfig, *, trace: Path | None = None) -> Trial:
    """Return a trial of the FP8 model of a run, with the weights of its newest checkpoint where it has one.

    The BF16 twin is left out. A learning rate of zero keeps the weights as they are.

    Raises:
        CheckpointError, ConfigError, DataError: as `octavo train` says.
        UnsupportedError: the run is in BF16 alone.
    """
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, twin=False))
    newest = checkpoint.latest(config.run.out / "checkpoints")
    setup = set_up(config) if newest is None else load_run.restore(checkpoint.load(newest), config)
    if setup.plan is None:
        raise UnsupportedError("the run is in BF16 alone: there is no FP8 to look at.")
    return _of_setup(setup, trace)


def _of_setup(setup: Setup, trace: Path | None) -> Trial:
    lane, run = setup.states[0], setup.config.run
    inputs_BT, targets_BT = (part.to(setup.device) for part in next(setup.loader))
    first = [part.chunk(run.accumulate)[0] for part in (inputs_BT, targets_BT)]

    def loss() -> Tensor:
        return lane.loss(*first)

    def step() -> None:
        lane.step(inputs_BT, targets_BT, step=1, lr=0.0, accumulate=run.accumulate)

    return Trial(lane.model, loss, step, trace)


def of_factory(name: str, *, recipe: str, device: torch.device, trace: Path | None = None) -> Trial:
    """Return a trial of what a function of the user's makes: `MODULE:FUNCTION`, called without arguments.

    It returns a model and a function that computes the loss of one batch, always the same: `(model, loss)`. A model
    without layers in FP8 is converted to `recipe`. The step is a forward and a backward.

    Raises:
        ConfigError: there is no such function, or it returns something else.
        NonFiniteError: a weight to be converted holds a NaN or an infinity.
    """
    made = _function(name)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ConfigError(f"--model {name}: it returns {type(made).__name__}, not a pair (model, loss function).")
    model, loss = made
    model.to(device)
    trial = Trial(model, loss, lambda: _forward_and_backward(model, loss), trace)
    if not trial.layers:
        convert(model, recipe)
    return trial


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # where the user is, as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function, None) if module and function else None
    except ModuleNotFoundError as error:
        raise ConfigError(f"--model {name}: {error}. Start where `import {module}` works.") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ConfigError(f"--model {name}: name a function as MODULE:FUNCTION, such as mine:build.")
    return found  # type: ignore[no-any-return]


def _forward_and_backward(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    loss().backward()
    model.zero_grad(set_to_none=True)
