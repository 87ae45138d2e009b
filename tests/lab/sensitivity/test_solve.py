"""Against every combination, tried."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from octavo.lab.sensitivity.solve import GRID, LEAST, Option, solve


def best(options: dict[str, list[Option]], budget: float) -> float:
    """Return the most that is saved within a budget, by trying everything."""
    tried = (picked for picked in product(*options.values()) if sum(o.cost for o in picked) <= budget)
    return max(sum(option.saved for option in picked) for picked in tried)


def totals(options: dict[str, list[Option]], found: dict[str, int]) -> tuple[float, float]:
    picked = [options[name][place] for name, place in found.items()]
    return sum(o.cost for o in picked), sum(o.saved for o in picked)


def draw(seed: int, layers: int = 5) -> dict[str, list[Option]]:
    rng = np.random.default_rng(seed)
    some = [[Option(float(c), float(s)) for c, s in zip(rng.exponential(1, 3), rng.normal(1, 1, 3), strict=True)]
            for _ in range(layers)]  # fmt: skip
    return {f"layer {i}": [Option(0.0, 0.0), *of_layer] for i, of_layer in enumerate(some)}


@pytest.mark.parametrize("budget", [0.0, 0.3, 2.0, 100.0])
@pytest.mark.parametrize("seed", range(6))
def test_within_the_budget_and_as_good_as_one_smaller_by_a_hundredth(seed, budget):
    options = draw(seed)
    cost, saved = totals(options, solve(options, budget))
    assert cost <= budget
    assert best(options, budget * (1 - len(options) / max(LEAST, GRID * len(options)))) <= saved + 1e-12
    assert saved <= best(options, budget) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_exact_where_costs_lie_on_the_grid(seed):
    options = {
        name: [Option(round(o.cost * 1000) / LEAST, o.saved) for o in of_layer] for name, of_layer in draw(seed).items()
    }
    assert totals(options, solve(options, 1.0))[1] == pytest.approx(best(options, 1.0), abs=1e-12)


def test_of_equal_savings_the_cheaper_and_the_first():
    options = {"a": [Option(0, 0), Option(0.5, 1), Option(0.2, 1), Option(0.2, 1)], "b": [Option(0, 0), Option(0, 0)]}
    assert solve(options, 1.0) == {"a": 2, "b": 0}


def test_what_takes_longer_is_not_chosen_and_what_costs_nothing_is():
    options = {"slower": [Option(0, 0), Option(0, -1)], "free": [Option(0, 0), Option(0, 1)]}
    assert solve(options, 0.0) == {"slower": 0, "free": 1}


def test_many_layers_lose_no_more_of_the_budget_than_few():
    options = {str(i): [Option(0, 0), Option(1 / 300, 1)] for i in range(400)}
    found = solve(options, 1.0)
    assert 297 <= sum(found.values()) <= 300


def test_the_budget_is_kept_to_the_last_bit():
    options = {str(i): [Option(0, 0), Option(1 / 3 + 1e-5, 1)] for i in range(3)}
    assert sum(solve(options, 1.0).values()) == 2
