"""Calibration files: the scales of a model's layers, as JSON, for static scaling.

    {
      "version": 1,
      "recipes": ["delayed"],
      "scales": {
        "layers.0.attention.wq.input": {"format": "e4m3", "scaling": "float32", "scale": 0.0117, "amax": 5.25}, ...
      }
    }

FP32 values are written so that they are read back bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from octavo import strict
from octavo.errors import ConfigError
from octavo.numerics import Scaling
from octavo.recipes import STATEFUL, Operand, Recipe

VERSION = 1
HOW_TO = (
    "Make the file with a few steps of training in the recipe 'delayed', and `octavo.scales(model).save(path)` after "
    "them; then convert(model, 'static', scales=path)."
)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One scale of a calibration file."""

    format: Literal["e4m3", "e5m2"]
    """Of the codes that it was made for."""
    scaling: Scaling
    """Whether it was rounded up to a power of two."""
    scale: float
    """What a code is multiplied by."""
    amax: float
    """The largest magnitude that was seen."""

    def check(self, name: str, operand: Operand) -> None:
        """Refuse this scale for an operand that it was not made for.

        Raises:
            ConfigError: another format or scaling, or a scale that is none.
        """
        if (self.format, self.scaling) != (operand.format, operand.scaling):
            raise ConfigError(
                f"the scale of '{name}' was made for {self.format} with {self.scaling} scales, and the recipe has "
                f"{operand.format} with {operand.scaling} scales. {HOW_TO}"
            )
        if not 0 < self.scale < math.inf or (self.scaling == "power_of_two" and math.frexp(self.scale)[0] != 0.5):
            raise ConfigError(
                f"the scale of '{name}' is {self.scale!r}: it must be a positive "
                f"{'power of two' if self.scaling == 'power_of_two' else 'number'}. {HOW_TO}"
            )


@dataclass(frozen=True, slots=True)
class _File:
    version: int
    recipes: tuple[str, ...]
    scales: dict[str, Calibrated] = field(default_factory=dict)


def write(path: Path, recipes: Sequence[str], scales: Mapping[str, Calibrated]) -> None:
    """Write a calibration file. `scales`: by `<layer>.input` or `<layer>.grad_output`.

    Raises:
        ConfigError: there are no scales, or the file cannot be written.
    """
    if not scales:
        raise ConfigError(f"{path}: no scale is known yet. {HOW_TO}")
    try:
        path.write_text(json.dumps(strict.to_dict(_File(VERSION, tuple(recipes), dict(scales))), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error


def read(path: Path) -> dict[str, Calibrated]:
    """Return the scales of a calibration file.

    Raises:
        ConfigError: it cannot be read, is malformed, of another version, or has a key that is none.
    """
    mapping = strict.read_file(path)
    if mapping.get("version", VERSION) != VERSION:
        raise ConfigError(
            f"{path}: calibration version {mapping['version']}; this version of octavo reads version {VERSION}."
        )
    return strict.read(_File, mapping, str(path)).scales


def check(recipes: Mapping[str, Recipe], scales: Mapping[str, Calibrated] | None) -> None:
    """Refuse layers with static scales that have none, and scales that nobody reads.

    Args:
        recipes: of each layer, by full name.
        scales: what `read` returned, None if no file was named.

    Raises:
        ConfigError: a scale is missing or was made for something else, or no recipe keeps scales.
    """
    if scales is not None and not any(recipe.keeps_scales for recipe in recipes.values()):
        raise ConfigError("a calibration file was given, and no layer has a recipe that keeps scales.")
    static = {
        f"{name}.{role}" if name else role: operand
        for name, recipe in recipes.items()
        for role in STATEFUL
        if (operand := recipe.kept_scale(role)) is not None and operand.scale_from == "static"
    }
    missing = [name for name in static if name not in (scales or {})]
    if missing:
        given = "no calibration file was given" if scales is None else "the calibration file has none"
        raise ConfigError(
            f"{len(missing)} of {len(static)} static scales are missing, the first that of '{missing[0]}': {given}. "
            + HOW_TO
        )
    for name, operand in static.items():
        assert scales is not None
        scales[name].check(name, operand)
