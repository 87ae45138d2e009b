"""Tokens to equal loss, on curves whose answer is known."""

from __future__ import annotations

import pytest

from octavo_bench.evidence import Curve, equal_loss, read_curve, tokens_to


def falling(speed: float, last: int = 100) -> Curve:
    """Return the curve 10 - speed * tokens at 0 to `last` tokens."""
    tokens = tuple(float(t) for t in range(0, last + 1, 10))
    return Curve(tokens, tuple(10 - speed * t for t in tokens))


def test_a_recipe_that_learns_half_as_fast_needs_twice_the_tokens() -> None:
    slow = equal_loss(falling(0.04), falling(0.08))
    assert (slow.loss, slow.tokens_ratio) == (pytest.approx(6), pytest.approx(2))
    fast = equal_loss(falling(0.08), falling(0.04))
    assert (fast.loss, fast.tokens_ratio) == (pytest.approx(6), pytest.approx(0.5))


def test_between_points_and_at_the_ends() -> None:
    curve = Curve((0.0, 10.0, 20.0, 30.0), (4.0, 2.0, 3.0, 1.0))
    assert tokens_to(curve, 2.5) == pytest.approx(22.5)  # for good, not the first time
    assert tokens_to(curve, 5.0) == 0
    assert tokens_to(curve, 1.0) == 30
    assert tokens_to(curve, 0.5) == 30


def test_a_curve_is_smoothed_over_a_twentieth_of_the_run() -> None:
    lines = [{"step": i, "tokens": 10 * i, "loss_fp8": 5.0 + (-1) ** i} for i in range(80)]
    curve = read_curve([*lines, {"step": 80, "heldout_loss_fp8": 1.0}, {"step": 81, "loss_fp8": None}], "fp8")
    assert len(curve.loss) == 77 and set(curve.loss) == {5.0}
    assert curve.tokens[:2] == (15.0, 25.0)
    assert read_curve(lines[:3], "fp8").loss == (6.0, 4.0, 6.0)
