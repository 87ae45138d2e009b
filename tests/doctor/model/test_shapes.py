"""Layers that FP8 makes slower are named; on a CPU that is no news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.conversion.gain import predicted_gain
from octavo.doctor.check import make
from octavo.doctor.model import shapes
from octavo.doctor.subjects import Trial
from octavo.recipes import load

Try = Callable[..., Trial]


def row(layer: str, gain: float, pads: int = 0) -> dict[str, Any]:
    return {"layer": layer, "shape": "64 x 64", "tokens": 96, "gain": gain, "pads": pads}


@pytest.mark.parametrize(
    ("rows", "verdict", "seen"),
    [
        ([row("a", 1.4), row("b", 1.2)], "ok", "2 layers gain, b least: predicted 1.20"),
        ([row("a", 1.4), row("b", 0.7), row("c", 0.9)], "warning", "2 of 3 layers lose, b most: predicted gain 0.70"),
        ([row("a", 1.4), row("b", 1.2, pads=16)], "warning", "1 of 2 layers are padded"),
    ],
)
def test_a_shape_that_does_not_pay_is_a_warning(rows: list[dict[str, Any]], verdict: str, seen: str) -> None:
    finding = shapes.judge(rows, on_gpu=True)
    assert finding.verdict == verdict and seen in finding.seen, finding
    assert ("multiples of 16" in finding.remedy) == (verdict == "warning" and "padded" in seen)


def test_shapes_are_those_of_the_layers_and_tokens_those_of_a_step(attempt: Try) -> None:
    rows = shapes._rows(attempt())
    assert [(row["layer"], row["shape"], row["tokens"]) for row in rows] == [
        ("first", "128 x 64", 96),
        ("second", "64 x 128", 96),
        ("third", "32 x 64", 96),
    ]
    assert rows[0]["gain"] == round(predicted_gain(load("folded"), 128, 64, 96), 3)
    assert [row["pads"] for row in rows] == [0, 0, 0]
    assert [row["pads"] for row in shapes._rows(attempt(recipe="block"))] == [128, 128, 128]


def test_on_a_cpu_no_shape_pays(attempt: Try) -> None:
    finding = make(shapes.shapes, attempt()).finding
    assert finding.verdict == "skipped" and "on an H200 3 of 3 layers lose" in finding.seen, finding


@pytest.mark.gpu
def test_a_tiny_model_does_not_pay_on_a_gpu(attempt: Try) -> None:
    result = make(shapes.shapes, attempt(device="cuda"))
    assert result.finding.verdict == "warning" and "--min-gain 1" in result.remedy, result.finding
