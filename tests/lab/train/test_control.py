"""The control of a preset applies to runs of which two in BF16 would differ as those that were measured."""

from __future__ import annotations

import math

import pytest

from octavo.lab.train.config import assemble, load_preset
from octavo.lab.train.control import control_of, controls, interval, studies, study_of
from octavo.lab.train.evaluate import student

DEMO = load_preset("demo", cuda=False)


def test_the_interval_is_that_of_one_more_gap_around_zero() -> None:
    assert interval([0.3, -0.4]) == pytest.approx(student(2) * math.sqrt(0.25 / 2))


@pytest.mark.parametrize(
    ("changes", "applies"),
    [
        ({}, True),
        ({"run": {"recipe": "block", "seed": 7}}, True),
        ({"run": {"steps": 640}}, False),
        ({"run": {"bf16_first_steps": 0}}, False),
        ({"optimizer": {"lr": 2e-3}}, False),
        ({"model": {"layers": 2}}, False),
        ({"data": {"source": "english"}}, False),
    ],
)
def test_a_run_has_the_control_of_the_preset_that_it_follows(
    changes: dict[str, dict[str, object]], applies: bool
) -> None:
    found = control_of(assemble(DEMO, ("test", changes)))
    expected = {
        "gap_control_percent": interval(controls()["demo-cpu"]),
        "gap_control_pairs": len(controls()["demo-cpu"]),
    }
    assert found == (expected if applies else {})


@pytest.mark.parametrize(
    ("run", "study"),
    [
        ({}, "folded"),
        ({"recipe": "rotated"}, "rotated"),
        ({"recipe": "block"}, None),
        ({"last_share": 0.3}, "folded+run.last_share=0.3"),
        ({"last_share": 0.2}, None),
        ({"last_share": 0.3, "last_recipe": "bf16"}, None),
    ],
)
def test_a_run_quotes_the_study_of_its_recipe(run: dict[str, object], study: str | None) -> None:
    found = study_of(assemble(DEMO, ("test", {"run": run})))
    assert found == ({"gap_study": studies()[study]} if study else {})
