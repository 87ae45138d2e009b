"""The precision map with the largest gain within a loss budget: a multiple-choice knapsack.

One option is chosen per layer. Costs are rounded up to a grid of `GRID` steps per layer, `LEAST` in all, so that the
budget always holds; rounding gives away at most a hundredth of it. On that grid the solution is exact, by dynamic
programming (Kellerer, Pferschy and Pisinger, Knapsack Problems, section 11.5), and deterministic: of equal gains the
smallest cost, then the fewest GEMMs in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

GRID, LEAST = 100, 10_000


class Option(NamedTuple):
    """An option of a layer."""

    cost: float
    """Nats per token; not negative."""
    saved: float
    """Milliseconds per step; negative if it is slower."""


def solve(options: Mapping[str, Sequence[Option]], budget: float) -> dict[str, int]:
    """Return the index of the chosen option per layer. The first option of each must cost nothing.

    Args:
        options: by layer.
        budget: nats per token, not negative.
    """
    steps = max(LEAST, GRID * len(options))
    best = np.zeros(steps + 1)  # largest gain by cost limit, in steps
    taken = np.zeros((len(options), steps + 1), np.uint8)
    for number, of_layer in enumerate(options.values()):
        best, taken[number] = _with_layer(best, [(_rounded(o.cost, budget, steps), o.saved) for o in of_layer])
    left, found = int(np.argmax(best)), {}
    for number, name in reversed(list(enumerate(options))):
        found[name] = int(taken[number, left])
        left -= _rounded(options[name][found[name]].cost, budget, steps)
    return {name: found[name] for name in options}


def _with_layer(best: np.ndarray, options: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest gains with one more layer, and the option of that layer that each uses."""
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
    """Return a cost in grid steps, rounded up; `steps + 1` if it exceeds the budget."""
    if cost <= 0:
        return 0
    return math.ceil(cost / budget * steps) if cost <= budget else steps + 1
