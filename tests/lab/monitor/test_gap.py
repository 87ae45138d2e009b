"""The gap's fluctuation excuses chance, and no loss that FP8 costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.lab.monitor.gap import FEWEST, GAP_LIMIT, PARTS, fluctuation, judge_gap

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
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


def test_one_run_tells_nothing_within_its_noise() -> None:
    told = {"gap_percent": 0.3, "gap_95_percent": 0.2, "gap_fluctuation_percent": 1.58}
    within = "No difference that one run can show: held-out loss {}0.30 % relative to BF16. "
    during = "During the run the gap fluctuated by ± 1.58 %."
    assert judge_gap(told) == (False, 1.58, within.format("+") + during)
    assert judge_gap({**told, "gap_percent": -0.3}).text == within.format("-") + during
    between = within.format("+") + "Between held-out sequences the gap varies by ± 2.00 % (95 %)."
    assert judge_gap({**told, "gap_95_percent": 2.0}) == (False, 2.0, between)


@pytest.mark.parametrize(
    ("gap", "opening"),
    [
        (0.9, "Above BF16 in this run, within the limit of 1 %: held-out loss +0.90 % relative to BF16."),
        (2.0, "Above BF16 in this run, beyond the limit of 1 %: held-out loss +2.00 % relative to BF16."),
        (-2.0, "Below BF16 in this run: held-out loss -2.00 % relative to BF16."),
    ],
)
def test_a_gap_beyond_its_noise_is_one_of_this_run(gap: float, opening: str) -> None:
    told = {"gap_percent": gap, "gap_95_percent": None, "gap_fluctuation_percent": 0.58}
    assert judge_gap(told) == (True, 0.58, f"{opening} During the run the gap fluctuated by ± 0.58 %.")


def test_pairs_of_bf16_runs_take_the_place_of_the_fluctuation() -> None:
    control = {"gap_control_percent": 0.0249, "gap_control_pairs": 8, "gap_95_percent": 0.01}
    told = judge_gap({"gap_percent": 0.0301, "gap_fluctuation_percent": 1.58, **control})
    opening = "Above BF16 in this run, within the limit of 1 %: held-out loss +0.030 % relative to BF16. "
    chance = "By chance alone two BF16 runs of this preset differ by up to 0.025 % (95 %, 8 pairs)."
    assert told == (True, 0.0249, opening + chance)
    assert judge_gap({"gap_percent": 0.015, **control}).text.startswith("No difference that one run can show")


def test_many_runs_say_what_one_cannot() -> None:
    study = {"arm": "folded", "percent": 0.2816, "half_width": 0.0104, "pairs": 13, "parameters": "11 M parameters"}
    told = {"gap_percent": 0.3, "gap_study": {**study, "tokens": 216_596_480}}
    many = " Many longer runs found +0.28 % ± 0.01 % (folded: 13 pairs, 11 M parameters, 217 M tokens)."
    assert judge_gap(told).text.endswith(f"chance moves it.{many}")
    assert judge_gap({**told, "gap_fluctuation_percent": 0.5}).text.endswith(f"by ± 0.50 %.{many}")


def test_a_run_without_an_estimate_of_its_noise_cannot_tell() -> None:
    """Held-out sequences alone do not say how far another run would be."""
    for fluctuated in (None, 0.0):
        found = judge_gap({"gap_percent": 0.0014, "gap_95_percent": 0.0041, "gap_fluctuation_percent": fluctuated})
        assert found.noise is None and not found.is_beyond
        opening = "One run cannot tell: held-out loss +0.0014 % relative to BF16, and the run is too short to know by"
        assert found.text == f"{opening} how much chance moves it."
    assert judge_gap({"gap_percent": None}).text == judge_gap({}).text == ""


def test_two_runs_in_high_precision_are_not_compared() -> None:
    summary = {"gap_percent": 0.0, "fp8_gemms_total": 0}
    assert judge_gap(summary) == (False, None, "No GEMM ran in eight bits: there is nothing to compare.")
