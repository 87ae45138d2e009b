"""Scales for a run: its model, its text, and batches as its steps would see them, for `octavo.calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.calibration import Calibration, Choice, Recalibration, Updates, calibrate
from octavo.errors import CheckpointError, ConfigError
from octavo.recipes import Recipe
from octavo.train import checkpoint
from octavo.train.config import RunConfig
from octavo.train.lane import Lane
from octavo.train.setup import policy_of, set_up
from octavo.train.state import restore_lane

Batch = tuple[Tensor, Tensor]
LOOK_EVERY = 10
"""Steps between two looks at what saturates, or a few more: as many as telemetry's steps divide."""


def calibrate_run(
    config: RunConfig,
    directory: Path | None = None,
    *,
    recipe: str | None = None,
    batches: int = 8,
    layers: Sequence[str] = (),
    backward: bool = True,
    choice: Choice | None = None,
    watch: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Calibration:
    """Find scales for the model of a run, on batches of its training text.

    A batch is what one forward sees: `run.batch` split by `run.accumulate`, and its loss counts as much. A constant or
    dynamic loss scale multiplies it, as in training.

    Args:
        directory: of a run: its newest checkpoint has the weights. None: they are made anew.
        recipe: calibrated for; by default the run's, or `static` where that keeps no scales.
        batches: how many.
        watch: what the batches go through: a progress bar.

    Raises:
        ConfigError: see `octavo.calibrate`; the configuration asks for what does not exist, or for weights in FP8.
        CheckpointError: there is no checkpoint, or one that cannot be read.
        DataError: the source has no text, or too little.
    """
    target = recipe_for(config, recipe)
    lane, loader = _build(config)
    found = "new weights" if directory is None else _restore(lane, directory)
    lane.model.train()

    def loss(_: Any, batch: Batch) -> Tensor:
        return lane.loss_scale.scaled(lane.loss(*batch) / config.run.accumulate)

    return calibrate(
        lane.model,
        watch(islice(_parts(loader, config.run.accumulate, lane.device), batches)),
        loss=loss,
        recipe=target,
        policy=policy_of(config, target),
        layers=layers,
        backward=backward,
        choice=choice,
        source=f"{found} on {config.data.source}",
    )


def recipe_for(config: RunConfig, recipe: str | None) -> Recipe:
    """Return the recipe to calibrate for: one that is named, else that of the run if it keeps scales, else `static`."""
    own = recipes.load(recipe or config.run.recipe)
    return own if recipe or own.keeps_scales else recipes.load("static")


def recalibration_of(config: RunConfig, model: nn.Module) -> Recalibration | None:
    """Return what makes the static scales of a run anew while it trains, None if nothing is to.

    Raises:
        ConfigError: the model has no static scales, or nothing measures what saturates.
    """
    run = config.run
    if not run.recalibrate_every and not run.recalibrate_above:
        return None
    if run.recalibrate_above and not run.telemetry_every:
        raise ConfigError("run.recalibrate_above: what saturates is seen by telemetry; set run.telemetry_every.")
    look_every = -(-LOOK_EVERY // max(run.telemetry_every, 1)) * max(run.telemetry_every, 1)
    updates = Updates(every=run.recalibrate_every, saturated_above=run.recalibrate_above or None, look_every=look_every)
    return Recalibration(model, updates, run.out / "calibration.json", rows=())


def _build(config: RunConfig) -> tuple[Lane, Iterable[Batch]]:
    """Return the model in BF16, and the training batches."""
    if config.run.weights == "fp8":
        raise ConfigError(
            "run.weights: 'fp8': no recipe that keeps scales computes with weights that are stored in FP8. Calibrate a "
            "run with weights in BF16 or FP32."
        )
    setup = set_up(replace(config, run=replace(config.run, twin=False, compile="off", recipe="bf16", scales="")))
    return setup.lanes[0], setup.loader


def _restore(lane: Lane, directory: Path) -> str:
    newest = checkpoint.latest(directory / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"{directory / 'checkpoints'}: there is no checkpoint. Name the run file instead to calibrate new weights."
        )
    found = checkpoint.load(newest)
    restore_lane(lane, found.tensors["fp8" if "fp8" in found.tensors else "bf16"], found.path)
    return str(newest)


def _parts(loader: Iterable[Batch], accumulate: int, device: torch.device) -> Iterator[Batch]:
    for inputs_BT, targets_BT in loader:
        parts = zip(inputs_BT.chunk(accumulate), targets_BT.chunk(accumulate), strict=True)
        for inputs, targets in parts:
            yield inputs.to(device), targets.to(device)
