"""NaN, drift, fast sums, and the codes to be served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.lab.doctor import accuracy
from octavo.lab.doctor.accuracy import NONFINITE_REMEDIES, nonfinite, serving
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.subjects import Trial
from octavo.nn import reuse_weight_codes

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
    result = run_check(nonfinite, trial)
    assert result.finding.verdict == "ok" and result.finding.numbers["loss"] == trial.loss().item(), result.finding
    assert all(p.grad is None for p in trial.model.parameters())


@pytest.mark.parametrize("name", ["second.weight", "third.bias"])
def test_a_parameter_is_named(attempt: Try, name: str) -> None:
    trial = attempt()
    with torch.no_grad():
        trial.model.get_parameter(name).view(-1)[3] = torch.nan
    result = run_check(nonfinite, trial)
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == f"{name} contains 1 non-finite value"
    assert result.remedy == NONFINITE_REMEDIES["weight"]


def test_an_input_is_named_with_its_layer(attempt: Try) -> None:
    result = run_check(nonfinite, attempt(wrong=spoiled))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen.startswith("input of second was the first non-finite tensor: 128 values")
    assert result.remedy == NONFINITE_REMEDIES["input"]


def test_a_gradient_is_named_with_its_layer(attempt: Try) -> None:
    result = run_check(nonfinite, attempt(loss=lambda y: Spoil.apply(y).square().mean()))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen.startswith("grad_output of third was the first non-finite tensor")
    assert result.remedy == NONFINITE_REMEDIES["grad_output"]


def test_a_loss_that_breaks_by_itself_is_not_blamed_on_a_layer(attempt: Try) -> None:
    result = run_check(nonfinite, attempt(loss=lambda y: y.detach().abs().mean().log() * 0 + y.mean() * 0 + torch.inf))
    assert result.finding.verdict == "failure" and result.finding.seen.startswith("the loss is inf"), result.finding
    assert "outside the FP8 layers" in result.remedy


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
    finding = accuracy.drift.look((fp8, high, {"good": 1.0, "bad": cosine}))
    assert finding.verdict == verdict, finding
    assert (finding.numbers["layer"] == "bad") == (cosine < 1.0 or cosine != cosine)


def test_an_honest_layer_drifts_little(attempt: Try) -> None:
    finding = run_check(accuracy.drift, attempt()).finding
    assert finding.verdict == "ok" and finding.numbers["cosine"] > 0.98, finding
    assert [row["layer"] for row in finding.rows] == ["first", "second", "third"]


def test_a_model_of_one_layer_has_a_cosine_too() -> None:
    model, x = nn.Linear(64, 64), torch.randn(16, 64)
    octavo.convert(model, "folded", policy=octavo.Policy(min_gain=0.0))
    finding = run_check(accuracy.drift, Trial(model, lambda: model(x).square().mean(), lambda: None)).finding
    assert [row["layer"] for row in finding.rows] == [""] and 0.98 < finding.numbers["cosine"] < 1, finding


def test_a_scale_that_is_too_small_drifts(attempt: Try) -> None:
    """A layer whose codes are a quarter of its weights."""
    trial = attempt()
    with reuse_weight_codes(trial.model):
        with torch.no_grad():
            trial.model.get_parameter("second.weight").mul_(4)  # fprop still reads the previous codes
        result = run_check(accuracy.drift, trial)
    assert result.finding.verdict == "failure" and "finer recipe" in result.remedy, result.finding


def test_a_gradient_that_fp8_makes_zero_drifts(attempt: Try) -> None:
    trial = attempt()
    third = trial.model.get_submodule("third")
    third.register_full_backward_hook(lambda layer, dx, dy: (0 * dx[0],) if layer.enabled else None)
    finding = run_check(accuracy.drift, trial).finding
    assert finding.verdict == "warning" and finding.numbers["cosine"] == 0, finding


def test_dropout_is_no_drift(attempt: Try) -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    trial = attempt(wrong=dropped, loss=lambda y: y[:1].square().mean())
    before = torch.get_rng_state()
    finding = run_check(accuracy.drift, trial).finding
    assert abs(finding.numbers["gap_percent"]) < 4  # with another mask more
    assert finding.numbers["cosine"] > 0.9
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("fast", "verdict"), [(2.001, "ok"), (2.05, "warning"), (2.5, "failure"), (NAN, "failure")])
def test_fast_sums_have_the_same_limits(fast: float, verdict: str) -> None:
    finding = accuracy.fast_sums.look((fast, 2.0, 3))
    assert finding.verdict == verdict, finding


@pytest.mark.parametrize(
    ("recipe", "seen"), [("folded", "no recipe in use has fast accumulation"), ("folded_fast", "3 layers")]
)
def test_only_a_gpu_sums_fast(attempt: Try, recipe: str, seen: str) -> None:
    finding = run_check(accuracy.fast_sums, attempt(recipe=recipe)).finding
    assert finding.verdict == "skipped" and seen in finding.seen, finding


@pytest.mark.gpu
def test_fast_sums_of_a_gpu_are_looked_at(attempt: Try) -> None:
    finding = run_check(accuracy.fast_sums, attempt(recipe="folded_fast", device="cuda")).finding
    assert finding.verdict == "ok", finding


Try = Callable[..., Trial]
CODES = 128 * 64 + 64 * 128 + 32 * 64


@pytest.mark.parametrize("recipe", ["folded", "rotated", "rowwise", "tensorwise", "block"])
def test_what_is_trained_is_what_is_served(attempt: Try, recipe: str) -> None:
    finding = run_check(serving, attempt(recipe=recipe)).finding
    assert finding.verdict == "ok" and finding.numbers["codes"] == CODES, finding
    assert finding.numbers["share_from_bf16"] > 0  # weights are FP32


def test_weights_written_while_their_codes_are_reused_are_found_and_the_remedy_helps(attempt: Try) -> None:
    trial = attempt()
    with reuse_weight_codes(trial.model):
        trial.model.get_parameter("second.weight").data.mul_(1.3)
        result = run_check(serving, trial)
    assert result.finding.verdict == "failure" and "first in second" in result.finding.seen, result.finding
    assert result.finding.numbers["differ"] > 0
    assert "reuse_weight_codes" in result.remedy
    finding = run_check(serving, trial).finding
    assert finding.verdict == "ok", finding


def test_a_scale_alone_is_found(attempt: Try) -> None:
    trial = attempt()
    with reuse_weight_codes(trial.model):
        trial.model.get_parameter("second.weight").data.mul_(2)  # a power of two: the codes stay
        finding = run_check(serving, trial).finding
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
    finding = run_check(serving, trial).finding
    assert finding.verdict == "ok" and [row["weights"] for row in finding.rows] == ["q (+1)"], finding


def test_the_codes_of_a_weight_that_is_stored_transposed_are_those_that_fprop_reads() -> None:
    """`Conv1D` of transformers, as in GPT-2."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, x = nn.Sequential(conv1d(128, 64)), torch.randn(16, 64)
    octavo.convert(model, "folded", policy=octavo.Policy(min_gain=0.0))
    trial = Trial(model, lambda: model(x).sum(), lambda: None)
    with reuse_weight_codes(model):
        finding = run_check(serving, trial).finding
    assert finding.verdict == "ok" and finding.numbers["codes"] == 128 * 64, finding


def test_fp8_weights_are_served_as_they_lie(attempt: Try) -> None:
    trial = attempt()
    octavo.convert(trial.model, "folded", policy=octavo.Policy(min_gain=0.0, weights="fp8"))
    finding = run_check(serving, trial).finding
    assert finding.verdict == "ok" and finding.numbers["share_from_bf16"] == 0, finding
