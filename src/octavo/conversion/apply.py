"""Carry out a plan on a user's model, in place, and undo it. Names, parameters, hooks and state_dict stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from octavo.conversion.plan import Plan, make_plan, refuse_fallbacks
from octavo.conversion.policy import Policy
from octavo.conversion.structure import Structure
from octavo.errors import NonFiniteError
from octavo.nn import Linear
from octavo.nn.functional import target_of
from octavo.nn.fused import FusedMLP, MLPRoles, fuse, unfuse
from octavo.nn.norm import Norm, adopt
from octavo.nn.shared import SharedInput
from octavo.recipes import Recipe, RecipeLike


def convert(
    model: nn.Module,
    recipe: RecipeLike = "folded",
    *,
    policy: Policy | None = None,
    tokens: int = 8192,
    strict: bool = False,
) -> Plan:
    """Make a model's linear layers compute in FP8, in place, and return the plan that was carried out.

    Call it before the optimizer or after it: the parameters are the same objects. A model that is already converted is
    converted anew to `recipe`; a layer that the plan leaves in BF16 is turned back.

    Args:
        strict: refuse, rather than run slowly, where a GPU has no fast kernel for the recipe.

    Raises:
        ConfigError: an unknown recipe, or a pattern that matches no layer.
        NonFiniteError: a weight to be converted holds a NaN or an infinity; nothing has been changed.
        UnsupportedError: under `strict`, a layer would fall back.
    """
    plan = make_plan(model, recipe, policy=policy, tokens=tokens)
    if strict:
        refuse_fallbacks(plan)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name in plan.recipes:
        _check_finite(name, layers[name])
    revert(model)
    for name, recipe in plan.recipes.items():
        Linear.adopt(layers[name], recipe)
    for structure in plan.structures:
        _join(model.get_submodule(structure.name), structure, plan.recipe)
    return plan


def _join(module: nn.Module, structure: Structure, recipe: Recipe) -> None:
    """Make the layers of a structure compute together. `recipe`: what norms quantise for."""
    if structure.kind == "norm":
        adopt(module, target_of(recipe.fprop.input) if recipe.fprop.is_fp8 else None)
        return
    if structure.kind == "mlp":
        fuse(module, MLPRoles(structure.activation, structure.layers[:-1], structure.layers[-1]))
        return
    layers = [cast(Linear, module.get_submodule(name)) for name in structure.layers]
    shared = SharedInput(layers)
    for layer in layers:
        layer.shared = shared


def revert(model: nn.Module) -> int:
    """Turn every FP8 layer back into an `nn.Linear`, in place; return how many there were."""
    for module in model.modules():
        if isinstance(module, FusedMLP):
            unfuse(module)
        elif isinstance(module, Norm):
            module.release()
    layers = _fp8_layers(model)
    for layer in layers:
        layer.release()
    return len(layers)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Compute in the model's own precision inside the block, for an evaluation beside the FP8 one."""
    modules = [module for module in model.modules() if type(module) is Linear or isinstance(module, Norm)]
    modules = [module for module in modules if module.enabled]
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


def _fp8_layers(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if type(module) is Linear]


def _check_finite(name: str, layer: nn.Linear) -> None:
    weight = layer.weight
    if weight.is_meta or bool(torch.isfinite(weight).all()):
        return
    count = int((~torch.isfinite(weight)).sum())
    row, column = (int(i) for i in torch.nonzero(~torch.isfinite(weight))[0])
    raise NonFiniteError(
        f"{'.'.join(filter(None, (name, 'weight')))} holds {count} value(s) that are NaN or infinite, the first at row "
        f"{row}, column {column}. "
        "Load a good checkpoint, or find the step that produced them; nothing was converted."
    )
