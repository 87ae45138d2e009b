"""The recipe of a layer that is built by itself, where none is named."""

from __future__ import annotations

import torch

from octavo.kernels.integer import unsupported_reason_device
from octavo.numerics import block_for
from octavo.recipes import DEFAULT, FALLBACK, Recipe, RecipeLike, load

SMALLEST_ROTATION = 16
"""Smallest block whose rotation spreads outliers enough for INT8: narrower layers compute fprop in FP8."""


def recipe_of_layer(recipe: RecipeLike | None, in_features: int, device: torch.device) -> Recipe:
    """Return the recipe that is named, or for None `DEFAULT`; `FALLBACK` where that would compute fprop in FP8.

    Raises:
        ConfigError: an unknown recipe.
    """
    if recipe is not None:
        return load(recipe)
    rotates = block_for(in_features, SMALLEST_ROTATION) == SMALLEST_ROTATION
    return load(DEFAULT if rotates and unsupported_reason_device(device) is None else FALLBACK)
