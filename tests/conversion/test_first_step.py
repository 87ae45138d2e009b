"""A layer that is in FP8 by the plan and never runs is named after the first step."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.conversion.first_step import _WAITING
from octavo.errors import UnsupportedError
from octavo.nn.cross_entropy import linear_cross_entropy


class Kernel(nn.Module):
    """A module that reads the weight of one of its layers where a kernel is there, as Mamba's."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.fast = nn.Linear(64, 64), nn.Linear(64, 64), True

    def forward(self, x: Tensor) -> Tensor:
        fast = self.fast and x.dim() == 2  # not by an attribute alone, so that the source does not tell
        return self.out(F.linear(x, self.into.weight) if fast else self.into(x))


@pytest.fixture
def said(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr("octavo.conversion.first_step.warn_once", messages.append)
    return messages


def step(model: nn.Module, *more: nn.Module, x: Tensor | None = None) -> None:
    optimizer = torch.optim.SGD([p for m in (model, *more) for p in m.parameters() if p.requires_grad], lr=1e-3)
    model(torch.randn(4, 64) if x is None else x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_layer_that_is_read_and_not_called_is_named_once(said):
    model = nn.Sequential(Kernel(), Kernel())
    assert octavo.convert(model).fp8_layers == 4
    model[1].fast = False
    for _ in range(3):
        step(model)
    (message,) = said
    assert message.startswith("1 layer planned in FP8 did not run in FP8 in the first step: 0.into. The code around")


def test_it_cannot_be_read_as_codes():
    model = nn.Sequential(Kernel())
    octavo.convert(model, policy=octavo.Policy(weights="fp8"))
    with pytest.raises(UnsupportedError, match="FP8Tensor"):
        model(torch.randn(4, 64))


def test_what_runs_and_what_waits_for_other_batches_is_not_named(said):
    model, unused = nn.Sequential(Kernel()), nn.Linear(64, 64)
    model.add_module("tower", unused)
    model.forward = model[0].forward  # the tower gets no batch
    octavo.convert(model)
    model[0].fast = False
    step(model)
    assert said == []


def test_the_step_of_another_model_says_nothing(said):
    model, other = nn.Sequential(Kernel()), nn.Linear(64, 64)
    octavo.convert(model)
    step(other)
    assert said == []
    step(model)
    assert len(said) == 1


class Adapter(nn.Module):
    """An adapter that reads the frozen weight of the layer that it wraps, as PEFT's HRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.turn = base, nn.Parameter(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_submodule("base_layer").weight @ self.turn)


def test_a_frozen_layer_inside_an_adapter(said):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    octavo.convert(model)
    model.requires_grad_(False)
    model[1] = Adapter(model[1])
    step(model)
    assert len(said) == 1 and "first step: 1.base_layer." in said[0]


def test_a_head_that_a_function_of_octavos_reads(said):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96))
    octavo.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    linear_cross_entropy(model[0](torch.randn(8, 64)), model[1].weight, torch.arange(8)).backward()
    optimizer.step()
    assert said == []


def test_fused_mlps_and_convolutions_are_called(said):
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.up(x)))

    model = nn.Sequential(nn.Conv1d(64, 64, 1), MLP())
    plan = octavo.convert(model)
    assert plan.fp8_layers == 3 and len(plan.structures) == 1
    step(model, x=torch.randn(2, 64, 64))
    assert said == []


def test_of_compiled_code_nothing_is_said(said):
    torch.compiler.reset()
    model = nn.Sequential(Kernel())
    octavo.convert(model)
    model[0].compile(backend="eager")
    step(model)
    assert said == []


class Gated(nn.Module):
    """An MLP that is fused, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.gate, self.up, self.down = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("kind", [Gated, Kernel])
def test_nothing_is_said_of_blocks_that_share_compiled_code(said, kind):
    torch.compiler.reset()
    model = nn.Sequential(kind(), kind(), kind())
    octavo.convert(model)
    for block in model:
        if kind is Kernel:
            block.fast = False
        block.compile(backend="eager")
    step(model)
    assert said == []


def test_nothing_is_left_behind():
    for _ in range(2):  # a model that is trained, and one that is gone
        model = nn.Sequential(Kernel())
        octavo.convert(model)
        assert model in _WAITING
    before = len(_WAITING)
    step(model)
    assert model not in _WAITING and len(_WAITING) == before - 1 and not vars(model[0].out).get("awaits_call")
    octavo.convert(model)
    del model
    gc.collect()
    assert len(_WAITING) == before - 1
