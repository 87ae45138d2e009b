"""Comparison of a module with a formula: agreement in results, gradients and everything else that a call does."""

import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo.nn.norm import Norm
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, shallow_copy


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
    return computes(lambda training: shallow_copy(module, training), formula, lambda: x, tolerance)


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


CONVERT = """
import sys, torch
from torch import nn
before = set(sys.modules)
import octavo
from user_modules import MLP
octavo.convert(model := nn.Sequential(MLP(), nn.RMSNorm(64)))
added = set(sys.modules) - before
assert type(model[0]).__name__ == "FusedMLP"
print(len(before), len(added), "|", *added)
"""


def test_convert_imports_neither_the_compiler_nor_much_else():
    """Each of these takes longer to import than all of Octavo."""
    paths = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1] / "conversion")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", CONVERT], env=environment, capture_output=True, text=True, check=True)
    *_, before, added = done.stdout.split("|")[0].split()
    assert int(added) < 0.15 * int(before)
    assert not {"torch._dynamo", "sympy", "triton", "numpy.random"} & set(done.stdout.split("|")[1].split())


def test_results_in_bf16_are_compared_with_exact_ones():
    def exact(module: nn.Module, x: Tensor) -> Tensor:
        return 2 * module.weight.double() * x.double()

    module, x = Doubled().bfloat16(), torch.randn(3, 4).bfloat16()
    assert computes(lambda training: shallow_copy(module, training), exact, lambda: x, 2e-2)
    assert not computes(lambda training: shallow_copy(module, training), exact, lambda: x, 1e-5)


def test_a_copy_has_no_hooks_and_holds_the_same_tensors():
    module = nn.Sequential(Doubled())
    module[0].register_forward_pre_hook(lambda *_: None)
    twin = shallow_copy(module, training=False)
    assert twin[0].weight is module[0].weight and twin[0] is not module[0]
    assert twin[0]._forward_pre_hooks == OrderedDict() and len(module[0]._forward_pre_hooks) == 1
    assert twin[0].box == module[0].box and twin[0].box is not module[0].box
    assert (twin[0].training, module[0].training) == (False, True)


def test_a_copy_of_a_converted_module_is_one_of_its_own_class():
    module = nn.Sequential(nn.RMSNorm(4))
    Norm.take(module[0], target=None, enabled=True, input_format="bf16")
    twin = shallow_copy(module, training=True)
    assert type(twin[0]) is nn.RMSNorm and vars(twin[0]).keys() == vars(nn.RMSNorm(4)).keys() | {"_compiled_call_impl"}
    assert isinstance(module[0], Norm)


class Slots(nn.Module):
    __slots__ = ("slot",)


def test_a_patched_forward_a_tensor_as_an_attribute_or_slots_make_a_module_unlike_its_class():
    plain, patched, holding, inside = Doubled(), Doubled(), Doubled(), nn.Sequential(Doubled())
    patched.forward, holding.factor, inside[0].factor = lambda x: x, torch.ones(()), torch.ones(())
    others = patched, holding, inside, Slots(), nn.Sequential(Slots())
    assert is_as_its_class(plain) and not any(map(is_as_its_class, others))


class Held(nn.Module):
    """It holds a number, a tuple, a child and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor, self.layer_idx, self.shared = nn.Parameter(torch.rand(4)), 0.0, 3, DOUBLED
        self.child, self.linear, self.twin = nn.Dropout(0.0), nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)


DOUBLED = Doubled()
DIFFERENT = {
    "a number": lambda m: setattr(m, "factor", 1.0),
    "its sign": lambda m: setattr(m, "factor", -0.0),
    "its type": lambda m: setattr(m, "factor", 0),
    "a position": lambda m: setattr(m, "layer_idx", 4),
    "a new attribute": lambda m: setattr(m, "more", None),
    "another object": lambda m: setattr(m, "shared", Doubled()),
    "a number of a child": lambda m: setattr(m.child, "p", 0.1),
    "the class of a child": lambda m: setattr(m, "child", nn.AlphaDropout(0.0)),
    "a child under two names": lambda m: setattr(m, "linear", m.twin),
    "a parameter under two names": lambda m: setattr(m.linear, "weight", m.twin.weight),
    "another child": lambda m: setattr(m, "other", nn.Identity()),
    "the width of a linear layer": lambda m: setattr(m, "linear", nn.Linear(4, 9, bias=False)),
    "its bias": lambda m: setattr(m, "linear", nn.Linear(4, 8)),
    "the shape of a parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.rand(5))),
    "no parameter": lambda m: setattr(m, "weight", None),
    "a buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x: x),
    "its class": lambda m: setattr(m, "__class__", type("Other", (Held,), {})),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_modules_that_may_differ_are_judged_one_by_one(change):
    modules, judged = [Held(), Held()], []
    change(modules[1])
    judge = judge_once(lambda module: judged.append(module) or len(judged))
    assert [judge(module) for module in (*modules, *modules)] == [1, 2, 1, 2] and judged == modules


def test_modules_alike_but_for_values_modes_and_hooks_are_judged_once():
    first, second, judged = Held(), Held().bfloat16().eval(), []
    second.child.register_forward_hook(lambda *_: None)
    second.linear.weight.data.zero_()
    judge = judge_once(judged.append)
    assert judge(first) is judge(second) is None and judged == [first]
