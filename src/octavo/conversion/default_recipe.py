"""The recipe of a model for which a user names none: `recipes.DEFAULT`, or `recipes.FALLBACK` and why."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from octavo.conversion.experts import find_experts
from octavo.conversion.policy import Policy
from octavo.kernels.gemm.integer import untried_reason
from octavo.recipes import DEFAULT, FALLBACK, Recipe, RecipeLike, load
from octavo.tensor import FP8Tensor


class Chosen(NamedTuple):
    """A recipe."""

    recipe: Recipe
    instead: str = ""
    """Why it is `FALLBACK`, although no recipe was named; empty otherwise."""


def choose(recipe: RecipeLike | None, model: nn.Module, policy: Policy, device: torch.device) -> Chosen:
    """Return the recipe that is named, or for None the default of a model: one recipe for all of it.

    Raises:
        ConfigError: an unknown recipe.
    """
    if recipe is not None:
        return Chosen(load(recipe))
    if reason := _unsupported_reason(model, policy, device):
        return Chosen(load(FALLBACK), f"recipe '{FALLBACK}' in place of the default, '{DEFAULT}': {reason}")
    return Chosen(load(DEFAULT))


def _unsupported_reason(model: nn.Module, policy: Policy, device: torch.device) -> str:
    """Return why the default recipe would be refused: at once, or later by an export; empty if it is not."""
    if reason := untried_reason(device):
        return reason
    if policy.weights == "fp8":
        return "weights stored in FP8 have no INT8 codes"
    stored = (name for name, parameter in model.named_parameters() if isinstance(parameter, FP8Tensor))
    if (name := next(stored, None)) is not None:
        return f"{name} is stored in FP8, and has no INT8 codes"
    for name, found in find_experts(model).items():
        if policy.reason_to_keep_experts(name, model.get_submodule(name), (*found.first, *found.second)) is None:
            return (
                f"inference engines rotate the inputs of linear layers, not of experts ({name or 'the model itself'})"
            )
    return ""
