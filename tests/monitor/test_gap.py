"""The gap's fluctuation excuses chance, and no loss that FP8 costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.monitor.gap import FEWEST, GAP_LIMIT, PARTS, fluctuation

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DEMOS = ("2026-11-22-amd-epyc-demo", "2026-11-23-amd-epyc-demo", "2026-11-23-nvidia-h200-demo")


def demo(name: str) -> tuple[float, NDArray[np.float64]]:
    """Return the held-out gap of a committed demo, and its gaps on batches."""
    row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"][0]
    return row["gap_percent"], np.array([line["gap_percent"] for line in row["history"] if "gap_percent" in line])


@pytest.mark.parametrize("count", [FEWEST, 20, 50, PARTS, PARTS + 1, 1000])
def test_no_step_of_the_gap_is_excused_and_so_no_rise(count: int) -> None:
    at = np.linspace(0, 1, count)
    steps = [(np.arange(count) >= start).astype(float) for start in range(1, count)]
    assert max(map(fluctuation, steps)) < 0.95
    for rise in (at, at**2, at**8, np.sqrt(at), np.expm1(5 * at) / np.expm1(5), np.maximum(0, 2 * at - 1)):
        assert fluctuation(3 * rise) < 3
    assert fluctuation(2.5 * at + 1) == pytest.approx(0, abs=1e-9)  # steady growth is no noise at all


def test_fluctuation_is_three_deviations_of_noise() -> None:
    signs = np.where(np.arange(PARTS) % 2, 0.5, -0.5)  # a deviation of 0.5 to the first order, and no trend
    assert fluctuation(signs) == pytest.approx(1.5, rel=0.02)
    noise = np.random.default_rng(0).normal(0, 0.5, 63 * PARTS)
    assert fluctuation(noise[:PARTS]) == pytest.approx(1.5, rel=0.3)
    assert fluctuation(noise) == pytest.approx(1.5 / math.sqrt(63), rel=0.3)  # the noise of batches averages out
    assert fluctuation(7 * noise) == pytest.approx(7 * fluctuation(noise))


def test_too_few_gaps_tell_nothing_and_nan_is_left_out() -> None:
    noise = np.random.default_rng(0).normal(0, 0.5, FEWEST)
    assert fluctuation(noise[1:]) == fluctuation([]) == 0 < fluctuation(noise)
    assert fluctuation([math.nan, *noise, math.inf]) == fluctuation(noise)


@pytest.mark.parametrize("name", DEMOS)
def test_chance_in_a_short_run_is_excused_and_a_true_loss_is_not(name: str) -> None:
    gap, gaps = demo(name)
    limit = max(GAP_LIMIT, fluctuation(gaps))
    assert abs(gap) <= limit
    lost = 6 * np.minimum(1, np.linspace(0, 8, len(gaps)))  # from the first eighth on
    growing = np.linspace(0, 6, len(gaps))
    for harm in (lost, growing):
        assert gap + 6 > max(GAP_LIMIT, fluctuation(gaps + harm))
