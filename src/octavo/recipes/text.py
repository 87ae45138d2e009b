"""Recipes as text: parsed strictly from a name, a mapping, or a TOML or JSON file, and explained in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo._util.recipe_names import BASE, DEFAULT, FALLBACK
from octavo.errors import ConfigError, did_you_mean
from octavo.recipes.presets import ALIASES, PRESETS
from octavo.recipes.spec import GEMMS, OPERANDS, STORED_SCALE_ROLES, Operand, Recipe, override

_ELSEWHERE = {
    "rowwise_with_gw_hp": ("torchao", "rowwise_bf16_wgrad"),
    "Float8CurrentScaling": ("Transformer Engine", "tensorwise"),
    "DelayedScaling": ("Transformer Engine", "delayed"),
    "Float8BlockScaling": ("Transformer Engine", "block"),
    "MXFP8BlockScaling": ("Transformer Engine", "mxfp8"),
}
"""Names of recipes of other libraries -> library, preset."""
DEEPEST = 16
"""Limit of recipes based on recipes, in levels."""
RecipeLike = str | Path | Mapping[str, Any] | Recipe


def names() -> tuple[str, ...]:
    """Return the names of the presets."""
    return tuple(PRESETS)


def about(name: str) -> str:
    """Return one sentence on a preset."""
    return " ".join((PRESETS[name].__doc__ or "").split("\n\n")[0].split())


def load(recipe: RecipeLike, where: str = "recipe") -> Recipe:
    """Return a recipe from a preset's name or alias (`ALIASES`), a `.toml` or `.json` file, or a mapping.

    A mapping names the preset it starts from in `base` (`BASE` if it names none) and overrides any of it:

        base = "folded"
        [wgrad]
        precision = "bf16"
        [modules]
        "layers.0.*" = "bf16"

    Raises:
        ConfigError: an unknown name or key, or a recipe that no kernel could run.
    """
    return _load(recipe, where, ())


def _load(recipe: Any, where: str, users: tuple[Path | None, ...]) -> Recipe:
    """Return a recipe. `users`: files, or None for mappings, that have this one as base or as a module's recipe."""
    if isinstance(recipe, Recipe):
        return recipe
    if len(users) > DEEPEST:
        raise ConfigError(f"{where}: recipes are nested more than {DEEPEST} deep.")
    if isinstance(recipe, Mapping):
        return _from_mapping(recipe, where, (*users, None))
    if not isinstance(recipe, str | Path):
        raise ConfigError(
            f"{where}: a recipe is a name, a file, a mapping or a Recipe, not {config_reader.shown(recipe)}."
        )
    path = Path(recipe)
    if path.suffix in (".toml", ".json"):
        if path in users:
            raise ConfigError(f"{where}: the recipe {path} is made from itself. Name a preset, or another file.")
        return _from_mapping({"name": path.stem, **config_reader.read_file(path)}, str(path), (*users, path))
    name = ALIASES.get(str(recipe), str(recipe))
    if name not in PRESETS:
        raise ConfigError(
            f"unknown {where} {config_reader.shown(name)}.{_suggestion(name)} "
            f"Recipes: {', '.join(PRESETS)}, or a .toml or .json file."
        )
    return PRESETS[name]()


def _suggestion(name: str) -> str:
    """Return a sentence on the preset that an unknown name may mean, or an empty string."""
    if name == "fp8":
        return f" The default in eight bits is '{DEFAULT}'; '{FALLBACK}' has all three GEMMs in FP8."
    if name in _ELSEWHERE:
        library, preset = _ELSEWHERE[name]
        return f" {library}'s '{name}' is '{preset}' here."
    return did_you_mean(name, [*PRESETS, *ALIASES])


def _from_mapping(mapping: Mapping[str, Any], where: str, users: tuple[Path | None, ...]) -> Recipe:
    base = _load(mapping.get("base", BASE), f"{where}: base", users)
    changes = {key: value for key, value in mapping.items() if key not in ("base", "modules")}
    merged = config_reader.merge(config_reader.to_dict(base), {"name": f"{base.name}, changed", **changes})
    modules = mapping.get("modules", {})
    if not isinstance(modules, Mapping):
        raise ConfigError(f"{where}: modules: expected a table of patterns, got {config_reader.shown(modules)}.")
    overrides: dict[str, Recipe] = {}
    for pattern, value in modules.items():
        other = _load(
            value, f"{where}: modules.{pattern}", users
        )  # equal ones are one: layers of one recipe compute together
        overrides[pattern] = next((known for known in overrides.values() if known == other), other)
    merged["modules"] = override(base.modules, overrides)
    return config_reader.read(Recipe, merged, where)


def brief(recipe: Recipe) -> str | dict[str, Any]:
    """Return the shortest input from which `load` makes this recipe: a preset's name, alone or with the differences.

    `modules` and their evidence are left out.
    """
    wanted = config_reader.to_dict(replace(recipe, modules={}, evidence={}))
    changes = {name: _difference(config_reader.to_dict(make()), wanted) for name, make in PRESETS.items()}
    base = min(changes, key=lambda name: _leaves(changes[name]))
    return {"base": base, "name": recipe.name, **changes[base]} if changes[base] else base


def _difference(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {key: (base[key], value) for key, value in wanted.items() if base[key] != value}
    return {k: _difference(old, new) if isinstance(new, Mapping) else new for k, (old, new) in pairs.items()}


def _leaves(mapping: Mapping[str, Any]) -> int:
    return sum(_leaves(value) if isinstance(value, Mapping) else 1 for value in mapping.values())


def explain(recipe: Recipe) -> str:
    """Return what the recipe does per GEMM: each operand, the source of its codes, and what backward keeps."""
    lines = [f"recipe {recipe.name}"]
    operands = {name: (a, b) for name, a, b in recipe.gemms()}
    width = max(
        [24, *(len(str(x)) + 2 for pair in operands.values() for x in pair if x.has_stored_scale or x.rotation)]
    )
    for name in GEMMS:
        if name not in operands:
            lines.append(f"  {name}  BF16")
            continue
        a, b = operands[name]
        left, right = OPERANDS[name]
        is_integer = a.format == b.format == "int8"
        sums = "INT8, exact sums" if is_integer else f"FP8, {recipe.gemm(name).accumulate} accumulation"
        lines.append(f"  {name}  {sums}")
        lines.append(f"    {left:<12}{a!s:<{width}}{_source(recipe, name, left, a, b)}")
        lines.append(f"    {right:<12}{b!s:<{width}}{_source(recipe, name, right, b, a)}")
    lines.append(f"  kept for backward: {', '.join(kept_for_backward(recipe))}")
    if recipe.has_stored_scales:
        lines.append(f"  kept from step to step: {_kept_from_step_to_step(recipe)}")
    lines += [f"  {pattern}: {other.name}" for pattern, other in recipe.modules.items()]
    return "\n".join(lines)


def _source(recipe: Recipe, gemm: str, role: str, operand: Operand, partner: Operand) -> str:
    if operand.is_folded:
        codes = "a second set of codes by row" if recipe.second(role) else "codes of fprop"
        return f"{codes}, transposed; its scales are folded into grad_output"
    if source := reused_from(recipe, gemm, role):
        return f"codes and scales of {source}, transposed"
    if partner.is_folded:
        return f"quantised, after {'input' if gemm == 'wgrad' else 'weight'}'s scales are multiplied in"
    return f"quantised{_SCALES[operand.scale_from]}"


_SCALES = {
    "current": "",
    "delayed": " with the scale of earlier steps",
    "just_in_time": " with the scale of earlier steps, or its own where that would saturate",
    "static": " with the scale of a calibration file",
}


def _kept_from_step_to_step(recipe: Recipe) -> str:
    operands = [operand for role in STORED_SCALE_ROLES if (operand := recipe.stored_scale(role)) is not None]
    if all(operand.scale_from == "static" for operand in operands):
        return "nothing; maxima are noted beside the scales of the calibration file"
    history = recipe.history
    steps = "the last step" if history.length == 1 or history.choose == "last" else f"the last {history.length} steps"
    margin = f", times 2^{history.margin}" if history.margin else ""
    return f"a scale and its maxima; scales are made of the largest value of {steps}{margin}"


def reused_from(recipe: Recipe, gemm: str, role: str) -> str | None:
    """Return the GEMM whose codes of this role, transposed, an operand reuses; None if it has its own."""
    if not recipe.reuses(f"{gemm}.{role}"):
        return None
    return "dgrad" if role == "grad_output" else "fprop"


def kept_for_backward(recipe: Recipe) -> list[str]:
    """Return what a linear layer saves for wgrad, and for dgrad, in words."""
    own = "input codes of wgrad" if recipe.wgrad.is_fp8 else "input in BF16"
    x = "input codes of fprop" if recipe.wgrad.is_fp8 and reused_from(recipe, "wgrad", "input") else own
    if recipe.second("input"):
        x = "input codes of the second set"
    w = "weight codes of fprop" if recipe.dgrad.is_fp8 and reused_from(recipe, "dgrad", "weight") else ""
    return [x, w or ("the weight and its second scales" if recipe.second("weight") else "the weight itself")]
