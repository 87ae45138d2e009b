"""Intervals against Student's own table, and against what they promise."""

from __future__ import annotations

import random

import pytest

from octavo.lab.train.evaluate import paired_interval, student
from octavo_bench.evidence import over_seeds


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (15, 2.131), (30, 2.042), (120, 1.980), (10**6, 1.960)],
)
def test_students_quantile(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=6e-4)


def test_pairs_of_two_and_three_seeds() -> None:
    assert over_seeds([0.1]).half_width is None
    two = over_seeds([0.1, 0.3])  # standard deviation 0.1414, error 0.1
    assert (two.mean, two.half_width) == (pytest.approx(0.2), pytest.approx(1.2706))
    three = over_seeds([1.0, 2.0, 3.0])
    assert three.half_width == pytest.approx(4.303 / 3**0.5)


def test_what_pairs_share_cancels() -> None:
    draw = random.Random(0)
    reference = [draw.gauss(2, 1) for _ in range(1024)]
    losses = [loss + 0.01 + draw.gauss(0, 0.01) for loss in reference]
    mean, half_width = paired_interval(losses, reference)
    assert half_width is not None and half_width < 0.001 < 0.01 - 3 * half_width
    assert abs(mean - 0.01) < half_width


def test_95_of_100_intervals_hold_the_truth_though_neighbours_are_alike() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(300):
        differences = [document for document in (draw.gauss(0, 1) for _ in range(64)) for _ in range(8)]
        mean, half_width = paired_interval(differences, [0.0] * 512)
        assert half_width is not None
        held += abs(mean) < half_width
    assert 0.91 < held / 300 < 0.99  # taken one by one, the sequences would hold it in half of the cases


def test_few_sequences() -> None:
    assert paired_interval([2.0], [1.0])[1] is None
    assert paired_interval([2.0, 2.0], [1.0, 1.0])[1] == 0
    with pytest.raises(ValueError, match="zip"):
        paired_interval([1.0], [1.0, 2.0])
