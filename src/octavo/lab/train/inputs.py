"""Copies of the recipe and calibration files of a run, in `inputs/` of its directory.

A run is read by them from any directory, on any machine, and after the files have been changed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import recipes
from octavo._util import config_reader
from octavo._util.files import os_errors, remove, write_text
from octavo.errors import CheckpointError, RunError
from octavo.lab.train.config import RunConfig
from octavo.lab.train.files import write_json

_RECIPES = ("recipe", "last_recipe")
_FOLDER = "inputs"


def keep_inputs(config: RunConfig, directory: Path, *, resumed: bool) -> None:
    """Copy the files that a run is given into its directory; of a resumed run only a last recipe that is another.

    Raises:
        ConfigError: a file cannot be read.
        RunError: a copy cannot be written, or those of another run not be removed.
    """
    if not resumed:
        with os_errors(directory / _FOLDER, RunError, "cannot be removed"):
            remove(directory / _FOLDER)
    for key in ("last_recipe",) if resumed else (*_RECIPES, "scales"):
        given, copy = getattr(config.run, key), _copy(directory, key)
        if not _is_file(given) or Path(given).absolute() == copy.absolute():
            continue
        with os_errors(copy, RunError):
            copy.parent.mkdir(exist_ok=True)
        if key == "scales":
            write_text(copy, config_reader.read_text(Path(given)), RunError)
        else:
            write_json(copy, config_reader.to_dict(recipes.load(given)))


def by_copies(config: RunConfig, saved: Mapping[str, Any], run: Path) -> RunConfig:
    """Return a configuration with the copies in the directory of a run in place of the files that the run was given.

    Args:
        config: the run's, possibly with other settings.
        saved: section `run` of the configuration that the run was trained with.
        run: directory of the run.
    """
    own = {key: value for key, value in copies(saved, run).items() if getattr(config.run, key) == saved[key]}
    return config.with_run(**own)


def copies(saved: Mapping[str, Any], run: Path) -> dict[str, str]:
    """Return the copies that there are of the files in section `run` of a configuration, by key."""
    known = {key: _copy(run, key) for key in (*_RECIPES, "scales") if _is_file(saved.get(key))}
    return {key: str(copy) for key, copy in known.items() if copy.exists()}


def with_files(config: RunConfig) -> RunConfig:
    """Return the configuration of a run to resume, with the run's copies of files that are gone."""
    named = copies(config_reader.to_dict(config.run), config.run.out)
    gone = {key: copy for key, copy in named.items() if not Path(getattr(config.run, key)).expanduser().exists()}
    return config.with_run(**gone)


def check_recipes(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Check that the recipe files of a run to resume are what they were when the run began.

    Another last recipe is deliberate; another content of the same file is not.

    Args:
        saved: section `run` of the configuration in the checkpoint.
        config: configuration of the run to resume.

    Raises:
        CheckpointError: one has been changed.
    """
    for key, copy in copies(saved, config.run.out).items():
        given = getattr(config.run, key)
        if key not in _RECIPES or (key == "last_recipe" and given != saved.get(key)):
            continue
        if recipes.load(copy) != recipes.load(given):
            raise CheckpointError(
                f"{given}: has been changed since this run began by it; {copy} is what it was. Resume with the same"
                " recipe, or start a new run with another --out."
            )


def are_same(key: str, saved: Any, config: RunConfig) -> bool:
    """Return True if a resumed run names a copy of its recipe or calibration file in place of the file itself."""
    copy = copies({key: saved}, config.run.out).get(key)
    return copy is not None and copy == getattr(config.run, key, None)


def present_name(recipe: str, saved: Mapping[str, Any], config: RunConfig) -> str:
    """Return what a resumed run calls a recipe of the run that it goes on with, whose file may be gone.

    Args:
        recipe: its name in a checkpoint.
        saved: section `run` of the configuration in it.
        config: configuration of the resumed run.
    """
    keys = (key for key in _RECIPES if saved.get(key) == recipe and are_same(key, recipe, config))
    return next((getattr(config.run, key) for key in keys), recipe)


def _is_file(given: Any) -> bool:
    return isinstance(given, str) and Path(given).suffix in (".toml", ".json")


def _copy(run: Path, key: str) -> Path:
    return run / _FOLDER / f"{key}.json"
