"""Calibrate a run (`octavo calibrate`): its model and batches for `octavo.calibrate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo import recipes
from octavo._util.config_reader import read_file
from octavo._util.files import os_errors, remove
from octavo._util.terminal import Report, quantity, reported, silent
from octavo.calibration import Calibration, Recalibration, ScalePolicy, Updates, calibrate
from octavo.errors import CheckpointError, ConfigError, RunError
from octavo.lab.data.loader import Batch
from octavo.lab.guard import GuardEvent
from octavo.lab.train.config import RunConfig
from octavo.lab.train.files import write_json
from octavo.lab.train.opening import RunSubject, open_run
from octavo.lab.train.setup import policy_of
from octavo.lab.train.train_state import TrainState
from octavo.nn.calibration_file import Calibrated
from octavo.nn.cross_entropy import weighted
from octavo.recipes import Recipe

LOOK_EVERY = 10
"""Steps between checks for saturation, rounded up to a multiple of `run.telemetry_every`."""


def calibrate_run(
    config: RunConfig,
    directory: Path | None = None,
    *,
    recipe: str | None = None,
    batches: int = 8,
    layers: Sequence[str] = (),
    backward: bool = True,
    scale_policy: ScalePolicy | None = None,
    report: Report = silent,
) -> Calibration:
    """Calibrate the model of a run on batches of its training text.

    A batch is the input of one forward pass: `run.batch` split by `run.accumulate`, with its loss weighted alike. A
    constant or dynamic loss scale is applied as in training.

    Args:
        config: the run.
        directory: directory of a run, for the weights of its newest checkpoint. None: initial weights.
        recipe: recipe to calibrate for; by default the run's, or `static` if that stores no scales.
        batches: number of batches.
        layers, backward, scale_policy: as for `octavo.calibrate`.
        report: called before each batch.

    Raises:
        ConfigError: see `octavo.calibrate`; an invalid configuration, or weights in FP8.
        CheckpointError: there is no checkpoint, or one that cannot be read.
        DataError: the source has no text, or too little.
    """
    target = recipe_for(config, recipe)
    subject = _opened(config, directory)
    setup = subject.setup()
    state = setup.states[0]
    state.model.train()

    parts = _Parts(setup.loader, config.run.accumulate, state)

    def loss(_: Any, part: Batch) -> Tensor:
        return state.loss_scale.scaled(weighted(state.loss(*part), parts.share))

    made = calibrate(
        state.model,
        reported(islice(parts, batches), batches, "batch", report),
        loss=loss,
        recipe=target,
        policy=policy_of(config, target),
        layers=layers,
        backward=backward,
        scale_policy=scale_policy,
    )
    return made.described(f"{subject.checkpoint.path if subject.checkpoint else 'new weights'} on {config.data.source}")


def recipe_for(config: RunConfig, recipe: str | None) -> Recipe:
    """Return the recipe to calibrate for: the named one, else the run's if it stores scales, else `static`."""
    own = recipes.load(recipe or config.run.recipe)
    return own if recipe or own.has_stored_scales else recipes.load("static")


def recalibration_of(config: RunConfig, model: nn.Module) -> Recalibration | None:
    """Return the recalibration of static scales during a run, None if there is none.

    Raises:
        ConfigError: the model has no static scales, or telemetry, which measures saturation, is off.
    """
    run = config.run
    if not _recalibrates(config):
        return None
    if run.recalibrate_above and not run.telemetry_every:
        raise ConfigError("run.recalibrate_above: telemetry measures saturation; set run.telemetry_every.")
    look_every = -(-LOOK_EVERY // max(run.telemetry_every, 1)) * max(run.telemetry_every, 1)
    updates = Updates(every=run.recalibrate_every, saturated_above=run.recalibrate_above or None, look_every=look_every)
    return Recalibration(model, updates, _calibration_file(config), rows=())


def calibration_of(config: RunConfig) -> Any:
    """Return the content of the calibration file that a run writes, which goes back with it; None without one."""
    file = _calibration_file(config)
    return read_file(file) if _recalibrates(config) and file.is_file() else None


def restore_calibration(config: RunConfig, content: Any) -> None:
    """Write back the result of `calibration_of`.

    Raises:
        RunError: the file cannot be written or removed.
    """
    file = _calibration_file(config)
    if content is not None:
        write_json(file, content)
    elif _recalibrates(config) and file.absolute() != Path(config.run.scales).absolute():
        with os_errors(file, RunError, "cannot be removed"):
            remove(file)


def _recalibrates(config: RunConfig) -> bool:
    return bool(config.run.recalibrate_every or config.run.recalibrate_above)


def _calibration_file(config: RunConfig) -> Path:
    return config.run.out / "calibration.json"


def recalibration_events(step: int, made: Mapping[str, Calibrated]) -> Iterator[GuardEvent]:
    """Yield the events of a step that updated these static scales: one in all, then one per scale; none for none."""
    if not made:
        return
    origin = next(iter(made.values())).origin
    text = f"static scales of {quantity(len(made), 'tensor')} were recalibrated{f': {origin.how}' if origin else ''}"
    yield GuardEvent(step, "info", "recalibration", text, action="scales recalibrated")
    for name, new in made.items():
        old, (layer, _, role) = new.previous[0].scale if new.previous else None, name.rpartition(".")
        text = f"static scale {new.scale:.4g}, before {'unknown' if old is None else f'{old:.4g}'}"
        yield GuardEvent(step, "info", "scale", text, "", layer, role, new.scale, old)


def _opened(config: RunConfig, directory: Path | None) -> RunSubject:
    """Return the model in BF16, with new weights or those of the newest checkpoint in a directory."""
    if config.run.weights == "fp8":
        raise ConfigError(
            "run.weights: 'fp8': recipes that store scales do not support weights in FP8. Calibrate a run with weights"
            " in BF16 or FP32."
        )
    config = config.with_run(baseline=False, compile="off", graph="off", recipe="bf16", scales="")
    if directory is None:
        return open_run(config, new=True)
    subject = open_run(config.with_run(out=directory))
    if subject.checkpoint is None:
        raise CheckpointError(
            f"{directory / 'checkpoints'}: there is no checkpoint. Name the run file to calibrate initial weights."
        )
    return subject


class _Parts:
    """The parts of batches on the device, each the input of one forward pass."""

    share: Tensor | float
    """Share of the batch's loss that the part last yielded has."""

    def __init__(self, loader: Iterable[Batch], accumulate: int, state: TrainState) -> None:
        self._loader, self._accumulate, self._state = loader, accumulate, state

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            inputs_BT, targets_BT = (tensor.to(self._state.device) for tensor in batch)
            shares = self._state.shares(targets_BT, self._accumulate)
            parts = inputs_BT.chunk(self._accumulate), targets_BT.chunk(self._accumulate), shares
            for inputs, targets, self.share in zip(*parts, strict=True):
                yield inputs, targets
