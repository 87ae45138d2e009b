"""Which layers of a model are calibrated, for which recipe, and which of them have one scale together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from octavo.conversion import Policy, make_plan
from octavo.errors import ConfigError
from octavo.nn import Linear, calibration
from octavo.nn.calibration import full_name
from octavo.recipes import STATEFUL, Operand, Recipe, RecipeLike, load


@dataclass(frozen=True, slots=True)
class Wanted:
    """A scale that is looked for."""

    layer: str
    """The full name of the layer."""
    role: str
    """`input` or `grad_output`."""
    recipe: Recipe
    """That it is made for."""
    operand: Operand
    """How the tensor is quantised."""
    together: tuple[str, ...]
    """The names of the scales that will be one with this, its own included: of layers that share an input."""


def wanted(
    model: nn.Module, recipe: RecipeLike | None, policy: Policy | None, patterns: Sequence[str], backward: bool
) -> dict[str, Wanted]:
    """Return the scales to look for, by name. The arguments are those of `octavo.calibrate`.

    Raises:
        ConfigError: no layer would keep scales, or a pattern matches nothing.
    """
    recipes, groups = (_own(model) if recipe is None else None) or _planned(model, recipe or "static", policy)
    roles = STATEFUL if backward else STATEFUL[:1]
    names = [full_name(layer, role) for layer in recipes for role in roles if recipes[layer].kept_scale(role)]
    chosen = calibration.matching(dict.fromkeys(names), patterns, "octavo.calibrate")
    return {name: _wanted(name, recipes, groups, chosen) for name in chosen}


def _wanted(
    name: str, recipes: Mapping[str, Recipe], groups: Sequence[Collection[str]], chosen: Collection[str]
) -> Wanted:
    layer, _, role = name.rpartition(".")
    operand = recipes[layer].kept_scale(role)
    assert operand is not None  # only such roles have a name
    group = next((group for group in groups if layer in group), (layer,))
    together = tuple(full for member in group if (full := full_name(member, role)) in chosen)
    return Wanted(layer, role, recipes[layer], operand, together)


Layers = tuple[dict[str, Recipe], list[tuple[str, ...]]]
"""The recipe of each layer by name, and the names of those that share an input."""


def _own(model: nn.Module) -> Layers | None:
    """Return the layers that keep scales already, None if there are none."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear) and m.recipe.keeps_scales}
    groups: dict[int, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(id(layer.shared or layer), []).append(name)
    return (
        ({name: layer.recipe for name, layer in layers.items()}, list(map(tuple, groups.values()))) if layers else None
    )


def _planned(model: nn.Module, recipe: RecipeLike, policy: Policy | None) -> Layers:
    """Return the layers that `octavo.convert` would make to keep scales.

    Raises:
        ConfigError: there are none.
    """
    plan = make_plan(model, recipe, policy=replace(policy or Policy(), min_gain=0.0))
    kept = {name: own for name, own in plan.recipes.items() if own.keeps_scales}
    if not kept:
        raise ConfigError(
            f"octavo.calibrate: no layer of the model would keep scales by the recipe '{load(recipe).name}'. Recipes "
            "that do are 'static', 'delayed' and 'just_in_time', and those that set `scale_from`."
        )
    shared = [structure for structure in plan.structures if structure.kind == "shared"]
    return kept, [tuple(full_name(one.name, child) for child in one.layers) for one in shared]
