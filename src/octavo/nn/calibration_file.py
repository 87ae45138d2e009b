"""Calibration files: the scales of a model's layers, as JSON, for static scaling.

    {
      "version": 2,
      "scales": {
        "layers.0.attention.wq.input": {
          "format": "e4m3", "scaling": "float32", "scale": 0.0117, "amax": 5.25,
          "statistics": {"elements": 65536, "flushed": 0.0012, ...},
          "origin": {"change": 2, "date": "2026-01-31T12:00:00+00:00", "recipe": "static", "how": "max, margin 1", ...},
          "previous": [{"scale": 0.0121, ...}, ...]
        }, ...
      }
    }

An entry has its origin and its previous values, so that `undo` can revert a change. FP32 values are written such that
they are read back bit for bit. Files of version 1, without statistics and origins, are read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from octavo._util import config_reader
from octavo._util.files import write_text
from octavo.errors import ConfigError, did_you_mean
from octavo.nn.modules import full_name
from octavo.numerics import Scaling
from octavo.recipes import STORED_SCALE_ROLES, Operand, Recipe

VERSION = 2
KEPT = 16
"""Number of previous values in an entry; older ones are dropped."""
HOW_TO = (
    "Make the file with `octavo calibrate` or `octavo.calibrate(model, batches).save(path)`, or with a few steps of "
    "training in the recipe 'delayed' and `octavo.scales(model).save(path)`; then "
    "convert(model, 'static', scales=path)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of a tensor from its calibration. Shares are of all elements, 0 to 1, with the resulting scale."""

    elements: int
    """Number of elements counted, in all batches."""
    batches: int
    """Number of times that the tensor was counted."""
    zero: float
    """Share of zeros."""
    flushed: float
    """Share that is nonzero and has a zero code."""
    subnormal: float
    """Share whose code has less than the full mantissa."""
    saturated: float
    """Share beyond the largest code by more than rounding."""
    percentiles: dict[str, float]
    """Percentiles of the magnitudes of nonzero elements."""
    batch_amax: tuple[float, float]
    """The smallest and the median of the batches' largest magnitudes; `amax` is the largest of them."""
    lowest: float
    """The smallest recommended scale: that of the scale policy without its margin."""
    highest: float | None
    """The largest recommended scale: few elements are flushed. If below `lowest`, the format is too narrow. None: no
    limit."""
    suggested: str
    """The narrowest format that holds the tensor: `e4m3`, `e5m2`, or `finer scales` if neither does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origin of a scale."""

    change: int = 1
    """Number of the change of the file that wrote the entry."""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of that change, UTC, ISO 8601."""
    recipe: str
    """Name of the recipe that the scale is for."""
    how: str
    """Method that chose the scale, and the reason for a change."""
    source: str = ""
    """Description of the model and the data."""
    data: str = ""
    """The hash of the data, `sha256:` and 64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One scale of a calibration file."""

    format: Literal["e4m3", "e5m2"]
    """Format of the codes."""
    scaling: Scaling
    """Rounding of the scale: up to a power of two, or none."""
    scale: float
    """A value is its code times this scale."""
    amax: float
    """The largest magnitude observed."""
    statistics: Statistics | None = None
    """Further statistics, if the tensor itself was counted."""
    origin: Provenance | None = None
    """Its provenance; missing in files of version 1."""
    previous: tuple[Calibrated, ...] = ()
    """Earlier values, the newest first; these have no `previous` of their own."""

    @property
    def change(self) -> int:
        """Number of the change that wrote it, 0 if unknown."""
        return 0 if self.origin is None else self.origin.change

    def after(self, before: Calibrated | None) -> Calibrated:
        """Return this scale with the one that it replaces as its previous value."""
        past = () if before is None else (replace(before, previous=()), *before.previous)
        return replace(self, previous=past[:KEPT])

    def reverted(self) -> Calibrated | None:
        """Return the scale that this one replaced, None if there was none."""
        return replace(self.previous[0], previous=self.previous[1:]) if self.previous else None

    def check(self, name: str, operand: Operand) -> None:
        """Check that this scale was made for an operand.

        Raises:
            ConfigError: another format or scaling, or a scale that is not positive and finite, or not a power of two.
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
    scales: dict[str, Calibrated] = field(default_factory=dict)


def write(path: Path, scales: Mapping[str, Calibrated]) -> None:
    """Write a calibration file atomically. `scales`: by `<layer>.input` or `<layer>.grad_output`.

    Raises:
        ConfigError: there are no scales, or the file cannot be written.
    """
    if not scales:
        raise ConfigError(f"{path}: no scale is known yet. {HOW_TO}")
    content = {"version": VERSION, "scales": {name: _plain(calibrated) for name, calibrated in scales.items()}}
    write_text(path, json.dumps(content, indent=1) + "\n", ConfigError)


def read(path: Path) -> dict[str, Calibrated]:
    """Return the scales of a calibration file.

    Raises:
        ConfigError: it cannot be read, is malformed, of another version, or has an unknown key.
    """
    mapping = config_reader.read_file(path)
    version = mapping.get("version", VERSION)
    if version not in (1, VERSION):
        raise ConfigError(f"{path}: calibration version {version}; this version of octavo reads versions 1 and 2.")
    if version == 1:
        mapping.pop("recipes", None)
    return config_reader.read(_File, mapping, str(path)).scales


def update(path: Path, scales: Mapping[str, Calibrated]) -> dict[str, Calibrated]:
    """Write scales into a new or existing file, as one change of it; return its content.

    Former values of an entry are kept as previous ones. Other entries stay unchanged.

    Raises:
        ConfigError: there are no scales, or the file is not a calibration file, or cannot be written.
    """
    before = read(path) if path.exists() else {}
    number = 1 + max((entry.change for entry in before.values()), default=0)
    after = dict(before)
    for name, calibrated in scales.items():
        origin = None if calibrated.origin is None else replace(calibrated.origin, change=number)
        after[name] = replace(calibrated, origin=origin).after(before.get(name))
    write(path, after)
    return after


def undo(path: Path, patterns: Sequence[str] = ()) -> dict[str, tuple[Calibrated, Calibrated | None]]:
    """Revert the last change of a file; return each entry that it had written, and its restored value, None if removed.

    Args:
        patterns: of layers (`layers.0.*`) or entries (`*.grad_output`): revert the last change of these only.

    Raises:
        ConfigError: a pattern that matches nothing, or a change that wrote all entries: nothing would be left.
    """
    scales = read(path)
    chosen = matching(scales, patterns, str(path))
    last = max((scales[name].change for name in chosen), default=0)
    undone = {name: (scales[name], scales[name].reverted()) for name in chosen if scales[name].change == last}
    after = {name: undone[name][1] if name in undone else calibrated for name, calibrated in scales.items()}
    left = {name: calibrated for name, calibrated in after.items() if calibrated is not None}
    if not left or not last:
        raise ConfigError(f"{path}: there is nothing to undo: these scales replaced no others.")
    write(path, left)
    return undone


def matching(names: Mapping[str, Any], patterns: Sequence[str], where: str) -> list[str]:
    """Return the entries that any of the patterns matches, by layer or by full name; all without patterns.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            near = did_you_mean(pattern, {*names, *(name.rpartition(".")[0] for name in names)})
            raise ConfigError(f"{where}: no layer or scale matches '{pattern}'.{near}")
    return [name for name in names if not patterns or any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _plain(calibrated: Calibrated) -> dict[str, Any]:
    """Return an entry as JSON, without unknown values."""
    entry = config_reader.to_dict(replace(calibrated, previous=()))
    entry["previous"] = [_plain(earlier) for earlier in calibrated.previous]
    for part in (entry, entry["origin"]):
        for key in [key for key in part or () if part[key] in (None, [], "")]:
            del part[key]
    return entry


def check(recipes: Mapping[str, Recipe], scales: Mapping[str, Calibrated] | None) -> None:
    """Check that layers with static scales have them, and that scales are used.

    Args:
        recipes: of each layer, by full name.
        scales: result of `read`, None without a file.

    Raises:
        ConfigError: a scale is missing or was made for something else, or no recipe stores scales.
    """
    if scales is not None and not any(recipe.has_stored_scales for recipe in recipes.values()):
        raise ConfigError("a calibration file was given, and no layer has a recipe that keeps scales.")
    static = {
        full_name(name, role): operand
        for name, recipe in recipes.items()
        for role in STORED_SCALE_ROLES
        if (operand := recipe.stored_scale(role)) is not None and operand.scale_from == "static"
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
