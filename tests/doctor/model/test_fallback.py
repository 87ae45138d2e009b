"""What does not run in FP8, or not by a fast kernel, is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import octavo
from octavo.doctor.check import make
from octavo.doctor.model.fallback import fallback
from octavo.doctor.subjects import Trial
from octavo.kernels import ledger

Try = Callable[..., Trial]


def test_the_products_of_a_step_are_counted(attempt: Try) -> None:
    finding = make(fallback, attempt()).finding
    assert finding.verdict == "ok", finding
    assert sum(finding.numbers["products"].values()) == 8  # the first layer has no dgrad


def test_a_forced_reference_is_a_failure_with_its_reason(attempt: Try) -> None:
    def slow(y: object) -> object:
        ledger.fall_back("norm ran as reference: OCTAVO_TRITON=0 switches Triton kernels off")
        return y.square().mean()  # type: ignore[attr-defined]

    result = make(fallback, attempt(loss=slow))
    assert result.finding.verdict == "failure" and "OCTAVO_TRITON=0" in result.finding.seen, result.finding
    assert "keep the layer in BF16" in result.remedy


def test_layers_that_are_switched_off_are_a_failure(attempt: Try) -> None:
    trial = attempt()
    with octavo.disabled(trial.model):
        result = make(fallback, trial)
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == "3 layers are converted, and no product ran in FP8"
    assert "leave octavo.disabled" in result.remedy


def test_a_model_that_is_not_converted_is_no_fault(attempt: Try) -> None:
    trial = attempt()
    octavo.revert(trial.model)
    finding = make(fallback, trial).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_on_a_gpu_nothing_falls_back(attempt: Try) -> None:
    finding = make(fallback, attempt(device="cuda")).finding
    assert finding.verdict == "ok", finding
