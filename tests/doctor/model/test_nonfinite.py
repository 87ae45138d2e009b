"""A NaN is named where it is, or where it came first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.doctor.check import make
from octavo.doctor.model.nonfinite import WHERE, nonfinite
from octavo.doctor.subjects import Trial

Try = Callable[..., Trial]


def spoiled(x: Tensor) -> Tensor:
    return torch.cat([x[:5], torch.full_like(x[5:6], torch.inf), x[6:]])


class Spoil(torch.autograd.Function):
    """Passes values on, and makes a gradient NaN."""

    @staticmethod
    def forward(ctx: object, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> Tensor:
        return torch.cat([dy[:1] * torch.nan, dy[1:]])


def test_a_model_without_one_is_well(attempt: Try) -> None:
    trial = attempt()
    result = make(nonfinite, trial)
    assert result.finding.verdict == "ok" and result.finding.numbers["loss"] == trial.loss().item(), result.finding
    assert all(p.grad is None for p in trial.model.parameters())


@pytest.mark.parametrize("name", ["second.weight", "third.bias"])
def test_a_parameter_is_named(attempt: Try, name: str) -> None:
    trial = attempt()
    with torch.no_grad():
        trial.model.get_parameter(name).view(-1)[3] = torch.nan
    result = make(nonfinite, trial)
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == f"{name} holds 1 values that are not finite"
    assert result.remedy == WHERE["weight"]


def test_an_input_is_named_with_its_layer(attempt: Try) -> None:
    result = make(nonfinite, attempt(wrong=spoiled))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen.startswith("input of second was the first not to be finite: 128 values")
    assert result.remedy == WHERE["input"]


def test_a_gradient_is_named_with_its_layer(attempt: Try) -> None:
    result = make(nonfinite, attempt(loss=lambda y: Spoil.apply(y).square().mean()))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen.startswith("grad_output of third was the first not to be finite")
    assert result.remedy == WHERE["grad_output"]


def test_a_loss_that_breaks_by_itself_is_not_blamed_on_a_layer(attempt: Try) -> None:
    result = make(nonfinite, attempt(loss=lambda y: y.detach().abs().mean().log() * 0 + y.mean() * 0 + torch.inf))
    assert result.finding.verdict == "failure" and result.finding.seen.startswith("the loss is inf"), result.finding
    assert "outside of the FP8 layers" in result.remedy
