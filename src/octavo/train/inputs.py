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
from octavo.train.config import RunConfig
from octavo.train.files import write_json

_RECIPES = ("recipe", "last_recipe")
_FOLDER = "inputs"


def keep_inputs(config: RunConfig, directory: Path, *, resumed: bool) -> None:
    """Copy the files that a run is given into its directory; of a resumed run only the last recipe, which may change.

    Raises:
        ConfigError: a file cannot be read.
        RunError: a copy cannot be written, or those of another run not be removed.
    """
    if not resumed:
        with os_errors(directory / _FOLDER, RunError, "cannot be removed"):
            remove(directory / _FOLDER)
    for key in ("last_recipe",) if resumed else (*_RECIPES, "scales"):
        given, copy = getattr(config.run, key), _copy(directory, key)
        if not _is_file(given):
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


def check_recipe(config: RunConfig) -> None:
    """Check that the recipe file of a run to resume is what it was when the run began.

    Raises:
        CheckpointError: it has been changed.
    """
    given = config.run.recipe
    copy = copies({"recipe": given}, config.run.out).get("recipe")
    if copy is not None and recipes.load(copy) != recipes.load(given):
        raise CheckpointError(
            f"{given}: has been changed since this run began by it; {copy} is what it was. Resume with the same recipe,"
            " or start a new run with another --out."
        )


def _is_file(given: Any) -> bool:
    return isinstance(given, str) and Path(given).suffix in (".toml", ".json")


def _copy(run: Path, key: str) -> Path:
    return run / _FOLDER / f"{key}.json"
