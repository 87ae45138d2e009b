"""A model without a layer in FP8 is told of; one with some says how many, by which recipe."""

from __future__ import annotations

from collections.abc import Callable

import octavo
from octavo.doctor.check import make
from octavo.doctor.model.layers import layers
from octavo.doctor.subjects import Trial

Try = Callable[..., Trial]


def test_what_is_in_fp8_is_counted_by_recipe(attempt: Try) -> None:
    trial = attempt(recipe="block")
    octavo.convert(trial.model, {"name": "mine", "base": "block", "modules": {"third": "bf16"}})
    finding = make(layers, trial).finding
    assert finding.verdict == "ok", finding
    assert (finding.numbers["layers"], finding.numbers["fp8"]) == (3, 2)
    assert finding.seen.startswith("2 of 3 layers are in FP8 (mine), weights of float32, 0.02 M parameters")


def test_a_model_in_bf16_is_a_warning_that_leads_to_the_plan(attempt: Try) -> None:
    trial = attempt()
    octavo.revert(trial.model)
    result = make(layers, trial)
    assert result.finding.verdict == "warning" and result.finding.seen == "0 of 3 layers are in FP8", result.finding
    assert "octavo plan" in result.remedy
