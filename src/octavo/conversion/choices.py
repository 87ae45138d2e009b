"""The fastest recipes for a planned model by predicted time, and their known cost in accuracy.

The cost that every recipe with fprop in FP8 has (docs/explanation/accuracy.md) is the same for all and not a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.conversion.gain import predicted_ms
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.policy import NO_FP8, TOO_SMALL
from octavo.conversion.roles import HEAD
from octavo.kernels.runtime.devices import GPUS, Rates
from octavo.kernels.runtime.dispatch import rates
from octavo.recipes import Recipe, load, names


class Choice(NamedTuple):
    """A recipe for all linear layers of a plan."""

    recipe: str
    head: bool
    """Whether output heads are in FP8 too."""
    gain: float
    """Predicted BF16 time / FP8 time of the GEMMs of all linear layers, heads included, with quantisation."""
    price: str
    """Known cost in accuracy beyond that of any recipe with fprop in FP8; empty if there is none."""

    def __str__(self) -> str:
        name = f"{self.recipe}{' with heads in FP8' if self.head else ''}"
        return f"{name} {self.gain:.2f}{f' ({self.price})' if self.price else ''}"


GAINS = 1.005
"""Least predicted gain that counts as one; gains are shown with two digits."""


def choices(layers: Sequence[LayerPlan], device: str, tokens: int) -> list[Choice]:
    """Return recipes for the layers of a plan, the fastest first; empty if the GPU's rates are unknown.

    Emulated recipes are left out, and those with stored scales, which measure no faster than `folded`. A layer without
    a gain is counted in BF16, as `Policy.min_gain` has it.
    """
    gpu = GPUS.get(device)
    known = gpu.rates if gpu else rates(torch.device(device))
    rows = [row for row in layers if row.kind == "linear"]
    if known is None or not rows:
        return []
    heads = (False, True) if any(row.reason == HEAD for row in rows) else (False,)
    recipes = [load(name) for name in names()]
    timed = [each for each in recipes if each.is_fp8 and not each.has_stored_scales and not each.is_emulated]
    bf16 = _ms(rows, load("bf16"), tokens, known, head=True)
    found = [
        Choice(each.name, head, bf16 / _ms(rows, each, tokens, known, head), price_of(each, head))
        for each in timed
        for head in heads
    ]
    return sorted(found, key=lambda choice: -choice.gain)


def advice(layers: Sequence[LayerPlan], device: str, tokens: int) -> list[str]:
    """Return a line on the fastest choice without a price, and on a faster one with a price."""
    found = choices(layers, device, tokens)
    if not found:
        return []
    if found[0].gain < GAINS:
        return [f"no recipe is predicted to beat BF16 at {tokens:,} tokens per forward: use more, or wider layers"]
    free = next(choice for choice in found if not choice.price)
    gemms = "the GEMMs of linear layers" if any(layer.is_experts for layer in layers) else "all GEMMs"
    lines = [f"fastest at the accuracy usual for FP8: {free} times BF16 over {gemms} (predicted)"]
    return lines if found[0] is free else [*lines, f"faster, but less accurate: {found[0]}"]


def price_of(recipe: Recipe, head: bool = False) -> str:
    """Return the price of a recipe, derived from its GEMMs; see `Choice.price`."""
    gemms = [recipe.gemm(name) for name, *_ in recipe.gemms()]
    prices = (
        "sums in fewer bits" if any(gemm.accumulate == "fast" for gemm in gemms) else "",
        "a head's error goes straight into the loss" if head else "",
    )
    return ", ".join(filter(None, prices))


def _ms(rows: Sequence[LayerPlan], recipe: Recipe, tokens: int, known: Rates, head: bool) -> float:
    """Return the predicted milliseconds of the GEMMs of one step, each layer without a gain in BF16."""
    bf16, total = load("bf16"), 0.0
    for row in rows:
        plain = predicted_ms(bf16, *row.shape, tokens, rates=known)
        converts = row.is_fp8 or row.reason.startswith((TOO_SMALL, NO_FP8)) or (head and row.reason == HEAD)
        total += min(plain, predicted_ms(recipe, *row.shape, tokens, rates=known)) if converts else plain
    return total
