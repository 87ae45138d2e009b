"""Codes that fprop reads against those that the weights have now."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import octavo
from octavo.doctor.check import make
from octavo.doctor.model.serving import serving
from octavo.doctor.subjects import Trial
from octavo.nn import weights_changed

Try = Callable[..., Trial]
CODES = 128 * 64 + 64 * 128 + 32 * 64


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "tensorwise", "block"])
def test_what_is_trained_is_what_is_served(attempt: Try, recipe: str) -> None:
    finding = make(serving, attempt(recipe=recipe)).finding
    assert finding.verdict == "ok" and finding.numbers["codes"] == CODES, finding
    assert finding.numbers["share_from_bf16"] > 0  # weights are FP32


def test_weights_written_behind_its_back_are_found_and_its_remedy_helps(attempt: Try) -> None:
    trial = attempt()
    trial.loss()
    trial.model.get_parameter("second.weight").data.mul_(1.3)
    result = make(serving, trial)
    assert result.finding.verdict == "failure" and "first in second" in result.finding.seen, result.finding
    assert result.finding.numbers["differ"] > 0
    assert "weights_changed()" in result.remedy
    weights_changed()
    finding = make(serving, trial).finding
    assert finding.verdict == "ok", finding


def test_a_scale_alone_is_found(attempt: Try) -> None:
    trial = attempt()
    trial.loss()
    trial.model.get_parameter("second.weight").data.mul_(2)  # a power of two: the codes stay
    finding = make(serving, trial).finding
    assert finding.verdict == "failure" and finding.numbers["differ"] == 0 and "64 scales" in finding.seen, finding


def test_layers_that_are_computed_together_are_one_stack() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) + self.k(x)

    model, x = Heads(), torch.randn(16, 64)
    octavo.convert(model, "tensorwise", policy=octavo.Policy(min_gain=0.0))
    trial = Trial(model, lambda: model(x).sum(), lambda: None)
    finding = make(serving, trial).finding
    assert finding.verdict == "ok" and [row["weights"] for row in finding.rows] == ["q (+1)"], finding


def test_fp8_weights_are_served_as_they_lie(attempt: Try) -> None:
    trial = attempt()
    octavo.convert(trial.model, "folded", policy=octavo.Policy(min_gain=0.0, weights="fp8"))
    finding = make(serving, trial).finding
    assert finding.verdict == "ok" and finding.numbers["share_from_bf16"] == 0, finding
