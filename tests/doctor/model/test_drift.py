"""What FP8 does to the loss and to gradients of the same weights and batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.doctor.check import make
from octavo.doctor.model import drift
from octavo.doctor.subjects import Trial

Try = Callable[..., Trial]
NAN = float("nan")


@pytest.mark.parametrize(
    ("fp8", "high", "cosine", "verdict"),
    [
        (2.001, 2.0, 0.99, "ok"),
        (1.95, 2.0, 0.99, "warning"),
        (2.05, 2.0, 0.99, "warning"),
        (2.2, 2.0, 0.99, "failure"),
        (2.0, 2.0, 0.5, "warning"),
        (2.0, 2.0, NAN, "warning"),
        (NAN, 2.0, 0.99, "failure"),
        (0.0, 0.0, 1.0, "ok"),
    ],
)
def test_loss_and_gradients_have_limits(fp8: float, high: float, cosine: float, verdict: str) -> None:
    finding = drift.judge(fp8, high, {"good": 1.0, "bad": cosine})
    assert finding.verdict == verdict, finding
    assert (finding.numbers["layer"] == "bad") == (cosine < 1.0 or cosine != cosine)


def test_an_honest_layer_drifts_little(attempt: Try) -> None:
    finding = make(drift.drift, attempt()).finding
    assert finding.verdict == "ok" and finding.numbers["cosine"] > 0.98, finding
    assert [row["layer"] for row in finding.rows] == ["first", "second", "third"]


def test_a_scale_that_is_too_small_drifts(attempt: Try) -> None:
    """Of a layer whose codes are four times as large as they should be."""
    trial = attempt()
    trial.loss()
    second = trial.model.get_submodule("second")
    with torch.no_grad():
        second.weight.data.mul_(4)  # behind Octavo's back: fprop reads the codes of before
    result = make(drift.drift, trial)
    assert result.finding.verdict == "failure" and "finer recipe" in result.remedy, result.finding


def test_a_gradient_that_fp8_makes_zero_drifts(attempt: Try) -> None:
    trial = attempt()
    third = trial.model.get_submodule("third")
    third.register_full_backward_hook(lambda layer, dx, dy: (0 * dx[0],) if layer.enabled else None)
    finding = make(drift.drift, trial).finding
    assert finding.verdict == "warning" and finding.numbers["cosine"] == 0, finding


def test_dropout_is_no_drift(attempt: Try) -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    trial = attempt(wrong=dropped, loss=lambda y: y[:1].square().mean())
    before = torch.get_rng_state()
    finding = make(drift.drift, trial).finding
    assert abs(finding.numbers["gap_percent"]) < 4  # with another mask more
    assert finding.numbers["cosine"] > 0.9
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("fast", "verdict"), [(2.001, "ok"), (2.05, "warning"), (2.5, "failure"), (NAN, "failure")])
def test_fast_sums_have_the_same_limits(fast: float, verdict: str) -> None:
    finding = drift.judge_sums(fast, 2.0, 3)
    assert finding.verdict == verdict, finding


@pytest.mark.parametrize(("recipe", "seen"), [("folded", "accumulates slowly"), ("folded_fast", "3 layers")])
def test_only_a_gpu_sums_fast(attempt: Try, recipe: str, seen: str) -> None:
    finding = make(drift.fast_sums, attempt(recipe=recipe)).finding
    assert finding.verdict == "skipped" and seen in finding.seen, finding


@pytest.mark.gpu
def test_fast_sums_of_a_gpu_are_looked_at(attempt: Try) -> None:
    finding = make(drift.fast_sums, attempt(recipe="folded_fast", device="cuda")).finding
    assert finding.verdict == "ok", finding
