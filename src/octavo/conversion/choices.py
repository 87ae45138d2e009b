"""The recipes that train a planned model fastest, by predicted time, and what some are known to cost in accuracy.

What every recipe with fprop in FP8 costs (docs/explanation/accuracy.md) is the same for all, and no price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo.conversion.gain import predicted_ms
from octavo.conversion.policy import HEAD, NO_FP8, TOO_SMALL
from octavo.kernels.devices import GPUS, Rates
from octavo.kernels.dispatch import rates
from octavo.recipes import Recipe, load, names

if TYPE_CHECKING:
    from octavo.conversion.layer_plan import LayerPlan
    from octavo.conversion.plan import Plan


class Choice(NamedTuple):
    """A way to train all linear layers of a plan."""

    recipe: str
    head: bool
    """Whether output heads are in FP8 too."""
    gain: float
    """Predicted BF16 time / FP8 time of the products of all linear layers, heads included, with what quantises."""
    price: str
    """What it is known to cost beyond what fprop in FP8 costs by any recipe; empty if nothing."""

    def __str__(self) -> str:
        name = f"{self.recipe}{' with heads in FP8' if self.head else ''}"
        return f"{name} {self.gain:.2f}{f' ({self.price})' if self.price else ''}"


GAINS = 1.005
"""Least predicted gain that is called one: it is shown with two digits."""


def choices(plan: Plan) -> list[Choice]:
    """Return what the plan's model can be trained by, the fastest first; empty where the GPU's rates are not known.

    Left out are recipes that are emulated, and those that keep scales from step to step, which measure no faster than
    `folded`. A layer that gains nothing is counted in BF16, as `Policy.min_gain` has it.
    """
    gpu = GPUS.get(plan.device)
    known = gpu.rates if gpu else rates(torch.device(plan.device))
    rows = [row for row in plan.layers if row.kind == "linear"]
    if known is None or not rows:
        return []
    heads = (False, True) if any(row.reason == HEAD for row in rows) else (False,)
    recipes = [load(name) for name in names()]
    timed = [each for each in recipes if each.is_fp8 and not each.has_stored_scales and not each.is_emulated]
    bf16 = _ms(rows, load("bf16"), plan.tokens, known, head=True)
    found = [
        Choice(each.name, head, bf16 / _ms(rows, each, plan.tokens, known, head), price_of(each, head))
        for each in timed
        for head in heads
    ]
    return sorted(found, key=lambda choice: -choice.gain)


def advice(plan: Plan) -> list[str]:
    """Return a line on the fastest choice without a price, and one on a faster one that has a price."""
    found = choices(plan)
    if not found:
        return []
    if found[0].gain < GAINS:
        return [f"no recipe is predicted to gain with {plan.tokens:,} tokens per forward: more, or wider layers, would"]
    free = next(choice for choice in found if not choice.price)
    gemms = "the GEMMs of linear layers" if any(layer.is_experts for layer in plan.layers) else "all GEMMs"
    lines = [f"fastest at the usual accuracy of FP8: {free} times BF16 in {gemms} (predicted)"]
    return lines if found[0] is free else [*lines, f"faster at a cost in accuracy: {found[0]}"]


def price_of(recipe: Recipe, head: bool = False) -> str:
    """Return the price of a recipe, by what it does; see `Choice.price`."""
    gemms = [recipe.gemm(name) for name, *_ in recipe.gemms()]
    prices = (
        "sums in fewer bits" if any(gemm.accumulate == "fast" for gemm in gemms) else "",
        "a head's error goes straight into the loss" if head else "",
    )
    return ", ".join(filter(None, prices))


def _ms(rows: Sequence[LayerPlan], recipe: Recipe, tokens: int, known: Rates, head: bool) -> float:
    """Return the predicted milliseconds of a step's products, each layer in BF16 where it gains nothing."""
    bf16, total = load("bf16"), 0.0
    for row in rows:
        plain = predicted_ms(bf16, *row.shape, tokens, rates=known)
        converts = row.is_fp8 or row.reason.startswith((TOO_SMALL, NO_FP8)) or (head and row.reason == HEAD)
        total += min(plain, predicted_ms(recipe, *row.shape, tokens, rates=known)) if converts else plain
    return total
