"""The definition of coefficients, against the formulas of a step written out for one parameter."""

import math

import pytest
import torch

from octavo.kernels.coefficients import HYPER, ParamSettings, StepInputs, coefficients, group_squares
from octavo.kernels.coefficients.reference import power
from octavo.kernels.optimizer import COEFFICIENTS
from octavo.kernels.runtime.transfers import PinnedStaging

GROUP = {
    "lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "sign": 1.0, "clip": math.inf,
    "clip_all": math.inf,
}  # fmt: skip


def made(groups=({},), own=((0, 10.0, 1.0, False),), squares=None, counts=(4.0,), decays_weights=True, **amp):
    """Return what a step takes of such settings, the counts, and what was skipped."""
    hyper = torch.tensor([[{**GROUP, **group}[name] for name in HYPER] for group in groups], dtype=torch.float64)
    rows = torch.tensor(own, dtype=torch.float64).reshape(-1, len(ParamSettings._fields))
    sums = None
    if squares is not None:
        sums = group_squares(torch.tensor(squares, dtype=torch.float64), rows, len(groups))
    counted, skipped = [torch.tensor(count) for count in counts], torch.zeros(1, dtype=torch.int32)
    result = coefficients(StepInputs(hyper, rows, sums, decays_weights, **amp), counted, skipped, PinnedStaging())
    return result, [float(count) for count in counted], int(skipped)


def columns(result, row=0):
    return dict(zip(COEFFICIENTS, result.coefficients[row].tolist(), strict=True))


@pytest.mark.parametrize("decays_weights", [True, False])
def test_every_column(decays_weights):
    result, counts, skipped = made(decays_weights=decays_weights)
    assert columns(result) == pytest.approx({
        "factor": 1.0, "first_share": 0.1, "second_decay": 0.95, "second_share": 0.05,
        "first_correction": 1 / (1 - 0.9**5), "root_correction": (1 - 0.95**5) ** -0.5, "eps": 1e-8, "lr": 3e-4,
        "weight_kept": 1 - 3e-5 if decays_weights else 1.0, "weight_decay": 0.1, "largest_update": 10.0,
        "first_decay": 0.9,
    }, rel=1e-7)  # fmt: skip
    assert (counts, skipped, result.steps.tolist(), result.skip.tolist()) == ([5.0], 0, [5], [0])
    assert result.norm is None


def test_what_a_parameter_has_of_its_own():
    groups = ({"sign": -1.0, "beta1": 0.95}, {"lr": 1.0})
    result, _, _ = made(groups, (ParamSettings(0, math.inf, 0.5, True), ParamSettings(1, 2.0)), counts=(0.0, 9.0))
    first, second = columns(result, 0), columns(result, 1)
    assert first["factor"] == pytest.approx(-0.05) and second["factor"] == 1.0
    assert first["lr"] == pytest.approx(1.5e-4) and second["lr"] == 1.0
    assert (first["largest_update"], second["largest_update"]) == (math.inf, 2.0)
    assert result.steps.tolist() == [1, 10]


def test_clipping_of_a_group_then_of_all():
    """Norms 3 and 4 (of two parameters); the first is clipped to 1, then all, 17^0.5 long, to 2."""
    own = (ParamSettings(1, 1.0), ParamSettings(0, 1.0), ParamSettings(1, 1.0))
    result, _, _ = made(({"clip": 1.0, "clip_all": 2.0}, {"clip_all": 2.0}), own, (7.0, 9.0, 9.0), (1.0, 1.0, 1.0))
    factors = result.coefficients[:, 0].tolist()
    assert factors == pytest.approx([2 / 17**0.5, 2 / 17**0.5 / 3, 2 / 17**0.5], rel=1e-5)
    assert float(result.norm) == 5.0


def test_a_gradient_scale_is_divided_by():
    result, _, _ = made(({"clip_all": 1.0},), squares=(256.0,), grad_scale=torch.tensor(8.0))
    assert float(result.norm) == 2.0 and columns(result)["factor"] == pytest.approx(1 / 16, rel=1e-5)


@pytest.mark.parametrize("squares", [(math.nan,), (math.inf,), None])
def test_a_step_that_is_skipped_is_counted_and_no_step(squares):
    amp = {"found_inf": torch.tensor(1.0)} if squares is None else {}
    result, counts, skipped = made(squares=squares, counts=(0.0,), **amp)
    assert (counts, skipped, result.steps.tolist(), result.skip.tolist()) == ([0.0], 1, [0], [1])
    assert math.isfinite(columns(result)["first_correction"])


def test_a_rank_without_parameters_has_the_norm():
    result, _, _ = made(own=(), squares=(), counts=())
    assert float(result.norm) == 0.0 and result.coefficients.shape == (0, len(COEFFICIENTS))


@pytest.mark.parametrize("exponent", [1, 2, 3, 10, 1023, 10**6])
def test_powers(exponent):
    bases = torch.tensor([0.0, 0.9, 0.999, 0.999999], dtype=torch.float64)
    found = power(bases, torch.full((4,), exponent, dtype=torch.int32))
    torch.testing.assert_close(found, bases**exponent, rtol=1e-9, atol=0)
