from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from octavo.train.schedule import is_bf16, learning_rate


def rate(step: int, *, steps: int = 100, warmup: float = 0.1, floor: float = 0.1) -> float:
    return learning_rate(step, steps=steps, peak=2.0, warmup=warmup, floor=floor)


def test_warm_up_rises_in_a_straight_line_and_never_starts_at_zero() -> None:
    assert [rate(s) for s in range(10)] == pytest.approx([0.2 * (s + 1) for s in range(10)])


def test_peak_follows_the_warm_up_and_the_floor_ends_the_run() -> None:
    assert rate(10) == pytest.approx(2.0)
    assert rate(99) == pytest.approx(0.2)


def test_halfway_down_is_the_mean_of_peak_and_floor() -> None:
    assert rate(10 + 44) + rate(10 + 45) == pytest.approx(2.0 + 0.2)
    # A quarter of the way along a straight line would leave 3/4.
    a_quarter_on = learning_rate(25, steps=101, peak=1.0, warmup=0.0, floor=0.0)
    assert a_quarter_on == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_falls_all_the_way_and_stays_down_past_the_end() -> None:
    rates = [rate(s) for s in range(10, 100)]
    assert rates == sorted(rates, reverse=True)
    assert rate(150) == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shortest_runs(steps: int) -> None:
    assert all(0 < rate(s, steps=steps) <= 2.0 for s in range(steps))


def test_all_warm_up() -> None:
    assert rate(99, warmup=1.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("first", "last_share", "bf16"),
    [(0, 0.0, []), (3, 0.0, [0, 1, 2]), (0, 0.2, [8, 9]), (1, 0.04, [0]), (1, 0.06, [0, 9]), (99, 0.0, range(10))],
)
def test_the_precision_of_each_step(first: int, last_share: float, bf16: Sequence[int]) -> None:
    steps = [step for step in range(10) if is_bf16(step, steps=10, first=first, last_share=last_share)]
    assert steps == list(bf16)
