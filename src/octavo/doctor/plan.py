"""What to examine, from what a user named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octavo.doctor import trials
from octavo.doctor.examination import Examination, Kind
from octavo.doctor.subjects import Machine
from octavo.errors import ConfigError
from octavo.monitor.store import FILE, RunReader
from octavo.train import device as devices
from octavo.train.config import RunConfig, assemble, load_file, load_preset

Settings = tuple[str, dict[str, Any]]


def examination(
    target: Path | None = None,
    *,
    preset: str | None = None,
    model: str | None = None,
    recipe: str | None = None,
    device: str = "auto",
    only: Sequence[str] = (),
    trace: Path | None = None,
) -> Examination:
    """Return the examination of a run file, a run's directory, a preset or a function; of none, that of the machine.

    Args:
        target: a run file, or the directory of a run.
        model: `MODULE:FUNCTION`, see `trials.of_factory`.
        recipe: in place of the run's.
        only: names of the checks to make.
        trace: directory for a trace of a few steps.

    Raises:
        ConfigError: there is no such file, preset, function, device, recipe or check.
    """
    where = devices.resolve(device)
    if model is not None:
        made = partial(trials.of_factory, model, recipe=recipe or "folded", device=where, trace=trace)
        return Examination({"model": made}, only)
    if target is not None and target.is_dir():
        return Examination(_of_run(target, _flags(recipe, str(where)), trace), only)
    if target is None and preset is None:
        if recipe is not None or trace is not None:
            raise ConfigError("--recipe and --trace are about a model: name a run, a run file, --preset or --model.")
        return Examination({"machine": partial(Machine, where, Path("runs"))}, only)
    layer = load_file(target) if target is not None else load_preset(str(preset), cuda=where.type == "cuda")
    config = assemble(layer, _flags(recipe, str(where)))
    return Examination({"model": partial(trials.of_config, config, trace=trace)}, only)


def _of_run(directory: Path, flags: Settings, trace: Path | None) -> dict[Kind, Callable[[], Any]]:
    """Return the record of a run, and its model unless that is being trained at this moment."""
    if not (directory / FILE).exists():
        raise ConfigError(f"{directory}: holds no run ({FILE}). Name the directory of a run, or a run file.")
    reader, file = RunReader(directory), directory / "config.json"
    subjects: dict[Kind, Callable[[], Any]] = {"run": lambda: reader}
    if file.exists() and reader.state() != "running":
        config = _in_place(assemble(load_file(file), flags), directory)
        subjects["model"] = partial(trials.of_config, config, trace=trace)
    return subjects


def _in_place(config: RunConfig, directory: Path) -> RunConfig:
    """Return the configuration of a run that may have been moved."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=directory))


def _flags(recipe: str | None, device: str) -> Settings:
    run = {"device": device} | ({"recipe": recipe} if recipe is not None else {})
    return "command line", {"run": run}
