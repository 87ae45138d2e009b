"""Layers in compiled code: one text stands for all fields that decide, and nothing is computed twice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import Policy
from octavo.kernels import record
from octavo.nn import Linear
from octavo.nn.fused import FusedMLP
from octavo.nn.norm import adopt
from octavo.nn.scaling_state import ScalingSlot
from octavo.nn.shared import SharedInput
from octavo.nn.telemetry_ops import StatsSlot
from octavo.nn.weight_codes import quantize_weights
from octavo.recipes import load

BUFFER = torch.zeros(3, 8)
FOLDED = load("folded")
assert FOLDED.plan.w is not None
CHANGED: dict[str, Any] = {
    "recipe": load("rowwise"),
    "enabled": False,
    "keeps_input": True,
    "shared": SharedInput([Linear(32, 32), Linear(32, 32)]),
    "scaling_slot": ScalingSlot(0, torch.ones(2, 2)),
    "weight_codes": quantize_weights([torch.ones(32, 32)], FOLDED.plan.w),
    "stats_slot": StatsSlot(BUFFER, 1, BUFFER),
}


@pytest.mark.parametrize("field", CHANGED)
def test_the_key_of_a_layer_tells_a_change_of_each_field(field: str) -> None:
    layer, other = Linear(32, 32, recipe="folded"), Linear(32, 64, recipe="folded")
    key, before = layer.call_key, getattr(layer, field)
    assert key == other.call_key
    setattr(layer, field, CHANGED[field])
    assert layer.call_key != key
    setattr(layer, field, before)
    assert layer.call_key == key


def test_the_key_names_every_field_that_a_layer_has() -> None:
    apart = {"scaling_state", "reads_codes", "awaits_call"}  # no forward of compiled code depends on them
    assert {*CHANGED} | apart == {*Linear.fields}


def test_copies_and_files_have_the_key_of_what_they_contain() -> None:
    layer = Linear(32, 32, recipe="folded")
    key = layer.call_key
    layer.weight_codes = CHANGED["weight_codes"]  # which copies do not have
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.call_key == key != layer.call_key
    with octavo.disabled(layer):
        assert pickle.loads(pickle.dumps(layer)).call_key == key


def test_a_norm_and_an_mlp_have_keys_and_released_ones_have_none() -> None:
    norm = nn.RMSNorm(32)
    adopt(norm, None)
    key = vars(norm)["call_key"]
    norm.enabled = False
    assert vars(norm)["call_key"] != key
    mlp = MLP()
    octavo.convert(mlp, "folded", policy=Policy(min_gain=0.0))
    assert isinstance(mlp, FusedMLP)
    key = mlp.call_key
    mlp.mlp_activation_inputs = "fp8"
    assert mlp.call_key != key
    octavo.revert(mlp)
    assert not any("call_key" in vars(module) for module in mlp.modules())


class Counting(Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(input)


def test_compiled_code_may_set_attributes_of_a_layer(recwarn: pytest.WarningsRecorder) -> None:
    layer, x = Counting(32, 32, recipe="folded"), torch.randn(4, 32)
    run = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(run(x), layer(x)) and layer.calls == 2
    torch._dynamo.reset()
    assert not any("lru_cache" in str(warning.message) for warning in recwarn)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


class Readers(nn.Module):
    """Three layers that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) + self.k(x) + self.v(x)
        return y


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_with_another_recipe_between_two_of_a_group_leaves_them_together(compiled: bool) -> None:
    model = Readers()
    octavo.convert(model, "folded", policy=Policy(min_gain=0.0))
    model.k.recipe = load("rowwise")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    x = torch.randn(8, 32)
    with torch.no_grad(), record() as ledger:
        run(x)
    torch._dynamo.reset()
    assert ledger.weights == ledger.gemms.total() == 3  # not v a second time
