"""The map of most milliseconds saved whose costs stay within a budget: a multiple-choice knapsack.

One choice is made for each layer. Costs are rounded up to a grid of `GRID` steps a layer, `LEAST` in all, so that the
budget is kept for certain; what rounding gives away is a hundredth of it at most. On that grid the solution is exact,
by dynamic programming (Kellerer, Pferschy and Pisinger, Knapsack Problems, section 11.5), and always the same one: of
equal savings, the smallest cost, and of those the fewest products in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

GRID, LEAST = 100, 10_000


class Option(NamedTuple):
    """A choice for a layer."""

    cost: float
    """Nats a token; not negative."""
    saved: float
    """Milliseconds a step; negative where it takes longer."""


def solve(options: Mapping[str, Sequence[Option]], budget: float) -> dict[str, int]:
    """Return for each layer the place of the option chosen. The first option of each must cost nothing.

    Args:
        budget: nats a token, not negative.
    """
    steps = max(LEAST, GRID * len(options))
    best = np.zeros(steps + 1)  # the most that is saved with a cost of at most so many steps
    taken = np.zeros((len(options), steps + 1), np.uint8)
    for number, of_layer in enumerate(options.values()):
        best, taken[number] = _with_layer(best, [(_rounded(o.cost, budget, steps), o.saved) for o in of_layer])
    left, found = int(np.argmax(best)), {}
    for number, name in reversed(list(enumerate(options))):
        found[name] = int(taken[number, left])
        left -= _rounded(options[name][found[name]].cost, budget, steps)
    return {name: found[name] for name in options}


def _with_layer(best: np.ndarray, options: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return what is saved at most with one layer more, and which of its options that takes."""
    found, taken = np.full_like(best, -np.inf), np.zeros(len(best), np.uint8)
    for place, (cost, saved) in enumerate(options):
        if cost >= len(best):
            continue
        with_it = best[: len(best) - cost] + saved
        better = with_it > found[cost:]
        found[cost:][better] = with_it[better]
        taken[cost:][better] = place
    return found, taken


def _rounded(cost: float, budget: float, steps: int) -> int:
    """Return a cost in steps of the grid, rounded up; one step more than there are where it exceeds the budget."""
    if cost <= 0:
        return 0
    return math.ceil(cost / budget * steps) if cost <= budget else steps + 1
