"""A precision map is a recipe file: a line a layer that says what it computes in, and below them the evidence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import strict
from octavo.errors import ConfigError
from octavo.recipes import Evidence, Recipe, brief


def precision_map(recipe: Recipe, chosen: Mapping[str, Recipe], evidence: Mapping[str, Evidence]) -> Recipe:
    """Return `recipe` with one of its own for every layer that was localised, and why.

    Layers that were not are left to the recipe and to the policy, as ever.
    """
    return replace(recipe, name=f"{recipe.name}, localised", modules=dict(chosen), evidence=dict(evidence))


def to_toml(recipe: Recipe, path: Path) -> Path:
    """Write a recipe as a TOML file and return its path. Reading it gives an equal recipe.

    Raises:
        ConfigError: the file cannot be written, or its name does not end in .toml.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a precision map is a .toml file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_lines(recipe)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}).") from error
    return path


def _lines(recipe: Recipe) -> Iterator[str]:
    top = brief(replace(recipe, modules={}, evidence={}))
    for key, value in top.items() if isinstance(top, Mapping) else [("base", top)]:
        yield f"{key} = {_value(value)}"
    yield "\n[modules]"
    for pattern, other in recipe.modules.items():
        yield f"{_value(pattern)} = {_value(brief(other))}"
    yield "\n[evidence]"
    for pattern, found in recipe.evidence.items():
        yield f"{_value(pattern)} = {_value(strict.to_dict(found))}"


def _value(value: Any) -> str:
    """Return a value in one line of TOML."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
