"""What was not finite first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import Policy, convert
from octavo.guard.locate import locate


@pytest.fixture(params=["folded", "bf16"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32), nn.Linear(32, 32))
    if request.param != "bf16":
        convert(model, request.param, policy=Policy(min_gain=0))
    return model


def run(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def test_nothing_is_found_where_all_is_finite(model: nn.Module) -> None:
    assert locate(model, lambda: run(model, torch.randn(2, 16, 32))) is None


def test_a_token_is_named(model: nn.Module) -> None:
    x = torch.randn(2, 16, 32)
    x[1, 5, 3] = torch.inf
    found = locate(model, lambda: run(model, x))
    assert found is not None
    assert (found.layer, found.role, found.place, found.elements) == ("0", "input", (1, 5), 1)
    assert str(found) == "0 input, sequence 1, token 5 (1 elements)"


def test_a_weight_is_named(model: nn.Module) -> None:
    model[2].weight.data[7, 2] = torch.nan
    found = locate(model, lambda: run(model, torch.randn(2, 16, 32)))
    assert found is not None
    assert str(found) == "2 weight, row 7 (1 elements)"


def test_a_gradient_is_named(model: nn.Module) -> None:
    def backward() -> None:
        y = model(torch.randn(2, 16, 32))
        seed = torch.ones_like(y)
        seed[0, 4] = torch.nan
        y.backward(seed)

    found = locate(model, backward)
    assert found is not None
    assert (found.layer, found.role, found.place) == ("3", "grad_output", (0, 4))


def test_its_hooks_are_gone_after_an_error(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        locate(model, lambda: run(model, torch.randn(2, 16, 31)))
    assert not any(module._forward_hooks for module in model.modules())
