"""The first non-finite tensor, and weight elements that no step can have moved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import Policy, convert
from octavo.errors import ConfigError
from octavo.lab.guard.locate import locate_nonfinite, weight_diff
from octavo.nn.fp8_weights import values


@pytest.fixture(params=["folded", "weights in FP8", "bf16"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    if request.param != "bf16":
        weights = "fp8" if request.param == "weights in FP8" else "unchanged"
        convert(model, "folded", policy=Policy(min_gain=0, weights=weights))
    return model


def struck(weight: nn.Parameter) -> torch.Tensor:
    """Return the values of a weight, of which one is NaN."""
    changed = values(weight.detach(), torch.float32).clone()
    changed[7, 2] = torch.nan
    return changed


def run(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def test_nothing_is_found_where_all_is_finite(model: nn.Module) -> None:
    assert locate_nonfinite(model, lambda: run(model, torch.randn(2, 16, 32))) is None


def test_a_token_is_named(model: nn.Module) -> None:
    x = torch.randn(2, 16, 32)
    x[1, 5, 3] = torch.inf
    found = locate_nonfinite(model, lambda: run(model, x))
    assert found is not None
    assert (found.layer, found.role, found.place, found.elements) == ("0", "input", (1, 5), 1)
    assert str(found) == "0 input, sequence 1, token 5 (1 element)"


def test_an_input_by_keyword_is_inspected() -> None:
    layer, x = nn.Linear(4, 4), torch.full((2, 4), torch.nan)
    found = locate_nonfinite(layer, lambda: layer(input=x))
    assert found is not None and found.role == "input"


def test_a_weight_is_named(model: nn.Module) -> None:
    model[2].weight.data.copy_(struck(model[2].weight))
    found = locate_nonfinite(model, lambda: run(model, torch.randn(2, 16, 32)))
    assert found is not None
    assert str(found) == "2 weight, row 7 (1 element)"
    assert str(found._replace(rank=3)) == "2 weight, row 7 (1 element) on rank 3"


def test_elements_of_a_weight_that_changed_are_described(model: nn.Module) -> None:
    weight = model[2].weight
    before = weight.detach().clone()
    assert weight_diff(before, weight, 0.0) == ""
    weight.data.copy_(struck(weight))
    assert weight_diff(before, weight, 0.1) == "one element, row 7, column 2, as a flipped bit leaves it"


def test_a_gradient_is_named(model: nn.Module) -> None:
    def backward() -> None:
        y = model(torch.randn(2, 16, 32))
        seed = torch.ones_like(y)
        seed[0, 4] = torch.nan
        y.backward(seed)

    found = locate_nonfinite(model, backward)
    assert found is not None
    assert (found.layer, found.role, found.place) == ("3", "grad_output", (0, 4))


def test_its_hooks_are_gone_after_an_error(model: nn.Module) -> None:
    with pytest.raises((RuntimeError, ConfigError)):
        locate_nonfinite(model, lambda: run(model, torch.randn(2, 16, 31)))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_change_within_reach_is_none() -> None:
    before = torch.randn(8, 8)
    assert weight_diff(before, before + 0.09, 0.1) == ""


def test_elements_of_a_vector_are_rows() -> None:
    found = weight_diff(torch.ones(8), torch.ones(8) + torch.eye(8)[2], 0.1)
    assert found.startswith("one element, row 2, column 0")


def test_a_flipped_bit_a_row_and_more() -> None:
    before = torch.randn(8, 8)
    now = before + 0.01
    now[3, 5] = 1e30
    assert weight_diff(before, now, 0.1) == "one element, row 3, column 5, as a flipped bit leaves it"
    now[3] = before[3] + 5
    assert weight_diff(before, now, 0.1) == "8 elements of row 3"
    now[6, 1] = torch.nan
    assert weight_diff(before, now, 0.1) == "9 elements of 2 rows, the first in row 3"
