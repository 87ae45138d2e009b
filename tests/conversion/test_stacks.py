"""Modules with one matrix per expert that multiply sorted rows are recognised by what they compute."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.conversion.stacks import find_stacks
from octavo.errors import NonFiniteError
from octavo.kernels import record
from octavo.nn.grouped import grouped_linear
from octavo.recipes import load

RECIPE = "folded"
SIZES = [5, 0, 11, 16]


class Stack(nn.Module):
    """JetMoE's and Granite's."""

    def __init__(self, experts=4, width=32, out=48):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, out, width) / 6)
        self.num_experts, self.input_size, self.output_size = experts, width, out

    def forward(self, inputs, expert_size):
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(parts[i], self.weight[i]) for i in range(self.num_experts)], dim=0)


class OfCounts(Stack):
    """Sizes in a tensor, a result that is filled, and the width that it holds as an integer."""

    def forward(self, rows, counts):
        y, start = rows.new_empty(len(rows), self.output_size), 0
        for weight, count in zip(self.weight, counts.tolist(), strict=True):
            y[start : start + count] = rows[start : start + count] @ weight.T
            start += count
        return y


class Scaled(Stack):
    def forward(self, inputs, expert_size):
        return super().forward(inputs, expert_size) * 1.01


class LastTwice(Stack):
    """Computes the rows of the last expert by the first matrix."""

    def forward(self, inputs, expert_size):
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(parts[i], self.weight[(i + 1) % 4 and i]) for i in range(4)], dim=0)


class Transposed(Stack):
    """Its matrices are (K, N)."""

    def forward(self, inputs, expert_size):
        parts = inputs.split(expert_size, dim=0)
        return torch.cat([parts[i] @ self.weight[i] for i in range(4)], dim=0)


@pytest.mark.parametrize("make", [Stack, OfCounts, lambda: Stack(32, 32, 32), lambda: OfCounts(32, 32, 64)])
def test_it_computes_as_a_grouped_layer_of_its_weight_bit_for_bit(make):
    torch.manual_seed(0)
    module = make()
    plain, x = copy.deepcopy(module), torch.randn(32, module.weight.shape[2])
    sizes = SIZES + [0] * (len(module.weight) - 4)
    given = torch.tensor(sizes) if isinstance(module, OfCounts) else sizes
    plan = octavo.convert(nn.Sequential(module), RECIPE)
    assert [(row.name, row.kind, row.is_fp8) for row in plan.layers] == [("0", f"{len(sizes)} matrices", True)]
    assert not plan.unconverted and list(module.state_dict()) == ["weight"] and isinstance(module, type(plain))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with record() as ledger:
        y = module(ours, given)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    expected = grouped_linear(theirs, plain.weight, ends, load(RECIPE))
    assert torch.equal(y, expected) and sum(ledger.gemms.values()) > 0
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad) and torch.equal(module.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("make", [Scaled, LastTwice, Transposed])
def test_what_computes_something_else_stays_and_is_named(make):
    plan = octavo.plan(nn.Sequential(make()), RECIPE)
    assert not plan.layers and [weight.name for weight in plan.unconverted] == ["0.weight"]


def test_switched_off_turned_back_and_called_with_wrong_sizes():
    torch.manual_seed(0)
    model, x = nn.Sequential(Stack()), torch.randn(32, 32)
    expected = model[0](x, SIZES)
    octavo.convert(model, RECIPE)
    assert find_stacks(model)["0"].shape == (48, 32)
    in_fp8 = model[0](inputs=x, expert_size=SIZES)
    assert not torch.equal(in_fp8, expected) and torch.equal(copy.deepcopy(model)[0](x, SIZES), in_fp8)
    with octavo.disabled(model):
        assert torch.equal(model[0](x, SIZES), expected)
    with pytest.raises(RuntimeError, match="split"):
        model[0](x, [5, 0, 11, 15])
    assert octavo.revert(model) == 1 and type(model[0]) is Stack
    assert torch.equal(model[0](x, SIZES), expected)


def test_a_nan_is_named_and_narrow_ones_say_why():
    model = nn.Sequential(Stack())
    with torch.no_grad():
        model[0].weight[1, 2, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        octavo.convert(model, RECIPE)
    assert octavo.plan(nn.Sequential(Stack(4, 40, 48)), RECIPE).layers[0].reason.startswith("(48, 40) features")
    assert "tensorwise" not in octavo.plan(nn.Sequential(Stack()), "tensorwise").layers[0].recipe
