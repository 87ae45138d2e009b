"""Comparison of a module with a formula: agreement in results, gradients and everything else that a call does."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo.nn.probe import CALLS, computes, shallow_copy


class Doubled(nn.Module):
    """Its formula is `2 w x`, and `also` is what it does besides."""

    def __init__(self, also=lambda module, y: y) -> None:
        super().__init__()
        self.weight, self.also, self.box = nn.Parameter(torch.rand(4)), also, {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.also(self, 2 * self.weight * x)


def formula(module: nn.Module, x: Tensor) -> Tensor:
    return 2 * module.weight * x


def is_doubled(module: nn.Module, x: Tensor | None = None, tolerance: float = 1e-6) -> bool:
    x = torch.linspace(-30, 30, 12).view(3, 4) if x is None else x
    return computes(lambda training: shallow_copy(module, training), formula, x, tolerance)


def in_every_mode(module: nn.Module) -> list[bool]:
    return [is_doubled(module.train(training)) for training in (True, False)]


def test_the_formula_and_nothing_else():
    assert in_every_mode(Doubled()) == [True, True]
    with torch.no_grad():
        assert is_doubled(Doubled())
    with torch.inference_mode():
        assert is_doubled(Doubled())
    with torch.device("meta"):
        module = Doubled()
    module.weight = nn.Parameter(torch.rand(4))
    with torch.device("meta"):
        assert is_doubled(module, torch.ones(1, 4, device="cpu"))


OTHERWISE = {
    "another result": lambda m, y: y * 1.001,
    "in training": lambda m, y: y * 2 if m.training else y,
    "in evaluation": lambda m, y: y if m.training else y * 2,
    "a random number": lambda m, y: y + 0 * torch.rand(()),
    "one in Python": lambda m, y: y + 0 * random.random(),
    "one in NumPy": lambda m, y: y + 0 * np.random.rand(),
    "by the seed": lambda m, y: y * 2 if torch.initial_seed() == CALLS - 1 else y,
    "an attribute": lambda m, y: setattr(m, "last", 1) or y,
    "an entry": lambda m, y: m.box.update(calls=m.box["calls"] + 1) or y,
    "no gradient": lambda m, y: y.detach(),
    "no gradient of the weight": lambda m, y: 2 * m.weight.detach() * (y / (2 * m.weight)).detach() + 0 * y,
    "half a gradient": lambda m, y: y.lerp(y.detach(), 0.5),
    "two": lambda m, y: (y, y),
    "another dtype": lambda m, y: y.double(),
    "a shape": lambda m, y: y.sum(-1),
    "an error": lambda m, y: [][0],
}


@pytest.mark.parametrize("also", OTHERWISE.values(), ids=OTHERWISE)
def test_anything_else_is_refused(also):
    module = Doubled(also)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert in_every_mode(module) == [False, False]
    assert module.box == {"calls": 0} and not hasattr(module, "last")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_generators_of_gpus_are_not_seeded(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(0)
    assert is_doubled(Doubled()) and seeded == [0]


def test_results_in_bf16_are_compared_with_exact_ones():
    def exact(module: nn.Module, x: Tensor) -> Tensor:
        return 2 * module.weight.double() * x.double()

    module, x = Doubled().bfloat16(), torch.randn(3, 4).bfloat16()
    assert computes(lambda training: shallow_copy(module, training), exact, x, 2e-2)
    assert not computes(lambda training: shallow_copy(module, training), exact, x, 1e-5)


def test_a_copy_has_no_hooks_and_holds_the_same_tensors():
    module = nn.Sequential(Doubled())
    module[0].register_forward_pre_hook(lambda *_: None)
    twin = shallow_copy(module, training=False)
    assert twin[0].weight is module[0].weight and twin[0] is not module[0]
    assert twin[0]._forward_pre_hooks == OrderedDict() and len(module[0]._forward_pre_hooks) == 1
    assert twin[0].box == module[0].box and twin[0].box is not module[0].box
    assert (twin[0].training, module[0].training) == (False, True)
