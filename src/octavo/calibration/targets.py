"""The tensors to calibrate in a model, and hooks that count their magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.histogram import MagnitudeHistogram
from octavo.conversion import Policy, disabled, make_plan
from octavo.errors import ConfigError
from octavo.nn import calibration_file
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import full_name, hooked, input_of
from octavo.nn.scaling_state import names_by_input
from octavo.recipes import STORED_SCALE_ROLES, Operand, Recipe, RecipeLike, load


@contextmanager
def count_magnitudes(
    model: nn.Module, targets: Mapping[str, CalibrationTarget]
) -> Iterator[dict[str, MagnitudeHistogram]]:
    """Count the magnitudes of layer inputs and output gradients inside the block.

    The model computes in its own precision, eagerly. The yielded dict gets an entry `<layer>.<role>` per tensor, in
    order of first occurrence.
    """
    seen: dict[str, MagnitudeHistogram] = {}
    roles: dict[str, set[str]] = {}
    for one in targets.values():
        roles.setdefault(one.layer, set()).add(one.role)
    hooks = (
        model.get_submodule(layer).register_forward_hook(_hook(layer, own, seen), prepend=True, with_kwargs=True)
        for layer, own in roles.items()
    )
    with hooked(hooks), disabled(model), torch.compiler.set_stance("force_eager"):
        yield seen


def _hook(layer: str, roles: Collection[str], seen: dict[str, MagnitudeHistogram]) -> Callable[..., None]:
    def count(role: str, x: Tensor) -> None:
        seen.setdefault(full_name(layer, role), MagnitudeHistogram()).add(x)

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        if "input" in roles:
            count("input", input_of(args, kwargs))
        if "grad_output" in roles and y.requires_grad:
            y.register_hook(lambda dy: count("grad_output", dy))

    return watch


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    """A scale to calibrate."""

    layer: str
    """Full name of the layer."""
    role: str
    """`input` or `grad_output`."""
    recipe: Recipe
    """Recipe of the layer."""
    operand: Operand
    """Quantisation of the tensor."""
    group: tuple[str, ...]
    """Names of the scales that share one value with this one, itself included: layers with the same input."""


def find_targets(
    model: nn.Module, recipe: RecipeLike | None, policy: Policy | None, patterns: Sequence[str], backward: bool
) -> dict[str, CalibrationTarget]:
    """Return the scales to calibrate, by name; arguments as for `octavo.calibrate`.

    Raises:
        ConfigError: no layer would store scales, or a pattern matches nothing.
    """
    recipes, groups = (_own(model) if recipe is None else None) or _planned(model, recipe or "static", policy)
    roles = STORED_SCALE_ROLES if backward else STORED_SCALE_ROLES[:1]
    names = [full_name(layer, role) for layer in recipes for role in roles if recipes[layer].stored_scale(role)]
    chosen = calibration_file.matching(dict.fromkeys(names), patterns, "octavo.calibrate")
    return {name: _target(name, recipes, groups, chosen) for name in chosen}


def _target(
    name: str, recipes: Mapping[str, Recipe], groups: Sequence[Collection[str]], chosen: Collection[str]
) -> CalibrationTarget:
    layer, _, role = name.rpartition(".")
    operand = recipes[layer].stored_scale(role)
    assert operand is not None  # only such roles have a name
    group = next((group for group in groups if layer in group), (layer,))
    members = tuple(full for member in group if (full := full_name(member, role)) in chosen)
    return CalibrationTarget(layer, role, recipes[layer], operand, members)


Layers = tuple[dict[str, Recipe], list[tuple[str, ...]]]
"""The recipe per layer name, and the names of layers with the same input."""


def _own(model: nn.Module) -> Layers | None:
    """Return the layers that store scales already, None if there are none."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LinearLayer) and m.recipe.has_stored_scales}
    return ({name: layer.recipe for name, layer in layers.items()}, names_by_input(layers)) if layers else None


def _planned(model: nn.Module, recipe: RecipeLike, policy: Policy | None) -> Layers:
    """Return the layers that would store scales after `octavo.convert`.

    Raises:
        ConfigError: there are none.
    """
    plan = make_plan(model, recipe, policy=replace(policy or Policy(), min_gain=0.0))
    kept = {name: own for name, own in plan.recipes.items() if own.has_stored_scales}
    if not kept:
        raise ConfigError(
            f"octavo.calibrate: no layer of the model would store scales by the recipe '{load(recipe).name}'."
            " Recipes that do are 'static', 'delayed' and 'just_in_time', and those that set `scale_from`."
        )
    shared = [structure for structure in plan.structures if structure.kind == "shared"]
    return kept, [tuple(full_name(one.name, child) for child in one.layers) for one in shared]
