from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from octavo.lab.train.config import OptimizerConfig
from octavo.lab.train.schedule import learning_rate, warm_up_note


def rate(step: int, *, steps: int = 100, warmup: float = 0.1, floor: float = 0.1, heldout=(), **other: Any) -> float:
    return learning_rate(OptimizerConfig(lr=2.0, warmup=warmup, min_lr=floor, **other), step, steps, heldout)


def test_warm_up_rises_in_a_straight_line_and_never_starts_at_zero() -> None:
    assert [rate(s) for s in range(10)] == pytest.approx([0.2 * (s + 1) for s in range(10)])


def test_peak_follows_the_warm_up_and_the_floor_ends_the_run() -> None:
    assert rate(10) == pytest.approx(2.0)
    assert rate(99) == pytest.approx(0.2)


def test_halfway_down_is_the_mean_of_peak_and_floor() -> None:
    assert rate(10 + 44) + rate(10 + 45) == pytest.approx(2.0 + 0.2)
    # A quarter of the way along a straight line would leave 3/4.
    assert rate(25, steps=101, warmup=0.0, floor=0.0) == pytest.approx(1 + math.cos(math.pi / 4))


def test_linear_leaves_what_is_left_of_the_run() -> None:
    assert rate(25, steps=101, warmup=0.0, floor=0.0, lr_schedule="linear") == pytest.approx(2.0 * 0.75)
    assert [rate(s, lr_schedule="linear") for s in (10, 99)] == pytest.approx([2.0, 0.2])


def test_wsd_stays_at_the_peak_and_falls_in_a_line_over_the_last_share() -> None:
    rates = [rate(s, steps=101, warmup=0.1, floor=0.0, lr_schedule="wsd", decay=0.2) for s in range(101)]
    assert rates[10:81] == pytest.approx([2.0] * 71) and rates[9] <= 2.0
    assert rates[80:] == pytest.approx([2.0 * (1 - i / 20) for i in range(21)])


def test_on_a_plateau_the_rate_is_halved_and_ends_at_the_floor() -> None:
    falling, flat = [4.0, 3.0, 2.9], [2.899, 2.95, 2.9]
    at = partial(rate, 50, lr_schedule="plateau", patience=3)
    assert at(heldout=falling) == at(heldout=falling + flat[:2]) == 2.0
    assert at(heldout=falling + flat) == 1.0 and at(heldout=falling + flat + [2.0] + flat[:2]) == 1.0
    assert at(heldout=falling + flat * 10) == pytest.approx(0.2)
    assert rate(4, lr_schedule="plateau", heldout=falling + flat) == pytest.approx(1.0)  # warm-up knows no plateau


@pytest.mark.parametrize(("share", "says"), [(0.0, "first updates"), (0.07, None), (0.3, None), (0.9, "hardly trains")])
def test_a_warm_up_that_is_none_or_all_is_warned_of(share: float, says: str | None) -> None:
    note = warm_up_note(OptimizerConfig(warmup=share))
    assert note is None if says is None else says in (note or "")


def test_falls_all_the_way_and_stays_down_past_the_end() -> None:
    rates = [rate(s) for s in range(10, 100)]
    assert rates == sorted(rates, reverse=True)
    assert rate(150) == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shortest_runs(steps: int) -> None:
    assert all(0 < rate(s, steps=steps) <= 2.0 for s in range(steps))


def test_all_warm_up() -> None:
    assert rate(99, warmup=1.0) == pytest.approx(2.0)
