"""What is recognised in a user's modules: every way to write an MLP or an attention, and nothing that only looks so."""

import contextlib
import copy
import functools
import itertools
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.conversion import Policy, convert, disabled, fusion_patterns, make_plan, revert
from octavo.conversion.fusion_patterns import FusionPattern, find_mlp, find_shared
from octavo.errors import ConfigError, UnsupportedError
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.nn import Linear
from octavo.nn import norm as norms
from octavo.nn.fused import FusedMLP, MLPRoles
from octavo.nn.norm import Norm, adopts
from octavo.recipes import load

WIDTH, HIDDEN = 64, 96
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
every_activation = pytest.mark.parametrize("kind", ACTIVATIONS)


class Gated(nn.Module):
    """`down(f(gate(x)) * up(x))`; subclasses write it in another way."""

    def __init__(self, names=("gate", "up", "down"), activation=F.silu, bias=False, inner_bias=False) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name in names[:2]:
            setattr(self, name, nn.Linear(WIDTH, HIDDEN, bias=inner_bias))
        setattr(self, names[2], nn.Linear(HIDDEN, WIDTH, bias=bias))
        self.start()

    def start(self) -> None:
        pass

    @property
    def layers(self):
        return [getattr(self, name) for name in self.names]

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.layers
        return down(self.activation(gate(x)) * up(x))


class Plain(Gated):
    def __init__(self, names=("up", "down"), activation=F.gelu, bias=False, inner_bias=False) -> None:
        super().__init__((*names[:1], "unused", names[1]), activation, bias, inner_bias)
        del self.unused
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.layers
        return down(self.activation(up(x)))


# --- MLPs that are ones ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("w1", "w3", "w2"),
        ("gate_proj", "up_proj", "down_proj"),
        ("gate", "up", "down"),
        ("wi_0", "wi_1", "wo"),
        ("z", "y", "x"),
        ("c", "a", "b"),
    ],
    ids=" ".join,
)
@every_activation
def test_names_do_not_matter(names, kind):
    assert find_mlp(Gated(names, ACTIVATIONS[kind])) == MLPRoles(kind, names[:2], names[2])


@every_activation
@pytest.mark.parametrize("names", [("c_fc", "c_proj"), ("up", "down"), ("b", "a")], ids=" ".join)
def test_without_a_gate(kind, names):
    assert find_mlp(Plain(names, ACTIVATIONS[kind])) == MLPRoles(kind, names[:1], names[1])


class UpFirst(Gated):
    def forward(self, x):
        up = self.up(x)
        return self.down(up * F.silu(self.gate(x)))


class ByHand(Gated):
    def forward(self, x):
        gate = self.gate(x)
        return F.linear(gate * torch.sigmoid(gate) * self.up(x), self.down.weight)


class Modules(Gated):
    def start(self):
        self.activation = nn.SiLU()
        self.dropout = nn.Dropout(0.0)
        self.nested = nn.Sequential(nn.Identity(), nn.Dropout(0.0))

    def forward(self, x):
        return self.nested(self.dropout(self.down(self.activation(self.gate(x)) * self.up(x))))


class Swapped(Gated):
    """The gate is what is called up."""

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.gate(x))


class Casts(Gated):
    def forward(self, x):
        return self.down((F.silu(self.gate(x).float()).to(x.dtype)) * self.up(x))


class Chunks(Gated):
    def forward(self, x, chunk=2):
        parts = [self.down(F.silu(self.gate(part)) * self.up(part)) for part in x.split(chunk)]
        return torch.cat(parts)


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Gated):
    @decorated
    def forward(self, hidden_states: Tensor, flag: bool = False) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("cls", [UpFirst, ByHand, Modules, Swapped, Casts, Chunks, Decorated])
def test_neither_does_the_way_it_is_written(cls):
    inner = ("up", "gate") if cls is Swapped else ("gate", "up")
    assert find_mlp(cls()) == MLPRoles("silu", inner, "down")


@pytest.mark.parametrize("names", list(itertools.permutations(("gate", "up", "down"))), ids=" ".join)
def test_the_order_of_the_children_does_not_matter(names):
    module = Gated()
    children = dict(module.named_children())
    module._modules = {name: children[name] for name in names}
    assert find_mlp(module) == MLPRoles("silu", ("gate", "up"), "down")


@pytest.mark.parametrize("width", [(64, 64), (7, 3)], ids=["square", "narrow"])
def test_sizes_do_not_matter(width):
    module = Gated()
    module.gate, module.up = nn.Linear(*width, bias=False), nn.Linear(*width, bias=False)
    module.down = nn.Linear(*reversed(width))
    assert find_mlp(module) == MLPRoles("silu", ("gate", "up"), "down")
    plain = Plain(("b", "a"))
    plain.b, plain.a = nn.Linear(*width, bias=False), nn.Linear(*reversed(width), bias=False)
    assert find_mlp(plain) == MLPRoles("gelu", ("b",), "a")


def test_dtypes_devices_and_modes_do_not_matter():
    assert find_mlp(Gated().bfloat16()) is not None
    assert find_mlp(Gated().to("meta")) is not None
    assert find_mlp(Gated().double()) is not None
    assert find_mlp(Gated().eval()) is not None
    assert find_mlp(Gated().requires_grad_(False)) is not None
    module = Gated()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert find_mlp(module) is not None
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert find_mlp(module) is not None
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_bias_of_the_last_layer_is_part_of_it():
    assert find_mlp(Gated(bias=True)) is not None and find_mlp(Plain(bias=True)) is not None


def test_a_converted_mlp_is_recognised_again():
    module = Gated()
    expected = find_mlp(module)
    convert(module)
    assert isinstance(module, FusedMLP) and find_mlp(module) == expected
    assert isinstance(module, FusedMLP)


@pytest.mark.parametrize("name, value", [("activation", F.logsigmoid), ("gate", nn.Linear(WIDTH, HIDDEN))])
def test_a_converted_mlp_that_has_changed_is_probed_again(name, value):
    module = Gated()
    convert(module)
    setattr(module, name, value)
    assert isinstance(module, FusedMLP) and find_mlp(module) is None


# --- MLPs that are none ---------------------------------------------------------------------------------------------


class Dropout(Modules):
    def start(self):
        super().start()
        self.dropout = nn.Dropout(0.1)


class NestedDropout(Modules):
    def start(self):
        super().start()
        self.nested[1].p = 0.01


class FunctionalDropout(Gated):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Scaled(Gated):
    def forward(self, x):
        return super().forward(x) * 0.5


class LayerScale(Gated):
    """It starts at 1 and is trained."""

    def start(self):
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


class Buffered(Gated):
    def start(self):
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return super().forward(x) * self.scale


class Normed(Gated):
    def start(self):
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return self.down(self.norm(F.silu(self.gate(x)) * self.up(x)))


class NormedWithoutWeights(Gated):
    def forward(self, x):
        return self.down(F.layer_norm(F.silu(self.gate(x)) * self.up(x), (self.up(x).shape[-1],)))


class Residual(Gated):
    def forward(self, x):
        return x + super().forward(x)


class Clamped(Gated):
    """Only large values show it."""

    def forward(self, x):
        return self.down((F.silu(self.gate(x)) * self.up(x)).clamp(-1e5, 1e5))


class Offset(Gated):
    """Only small values show it."""

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * (self.up(x) + 1e-6))


class Mixes(Gated):
    """Tokens see each other."""

    def forward(self, x):
        return super().forward(x + torch.roll(x, 1, dims=-2))


class LargestHidden(Gated):
    """Only the 32 largest hidden numbers count: of 24 in a tiny copy, all."""

    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        return self.down(torch.where(h >= h.topk(min(32, h.shape[-1]), -1).values[..., -1:], h, 0))


class LargestInput(Gated):
    def forward(self, x):
        return super().forward(torch.where(x >= x.topk(min(32, x.shape[-1]), -1).values[..., -1:], x, 0))


class LargestResult(Gated):
    def forward(self, x):
        y = super().forward(x)
        return torch.where(y >= y.topk(min(32, y.shape[-1]), -1).values[..., -1:], y, 0)


class LargestInTraining(LargestHidden):
    def forward(self, x):
        return super().forward(x) if self.training else Gated.forward(self, x)


class OtherInEvaluation(Gated):
    def forward(self, x):
        return super().forward(x) if self.training else self.down(F.relu(self.gate(x)) * self.up(x))


class NoisyInTraining(Gated):
    def forward(self, x):
        return super().forward(x) + (torch.randn(x.shape[-1]) if self.training else 0)


class TwoResults(Gated):
    def forward(self, x):
        return super().forward(x), None


class TwoArguments(Gated):
    def forward(self, x, mask):
        return super().forward(x) * mask


class Double(Gated):
    def forward(self, x):
        return super().forward(x).double()


class Summed(Gated):
    def forward(self, x):
        return super().forward(x).sum(-1)


class Raises(Gated):
    def forward(self, x):
        raise KeyError("not today")


class Twice(Gated):
    def forward(self, x):
        return super().forward(super().forward(x))


class ThirdUnused(Gated):
    def forward(self, x):
        return self.down(F.silu(self.gate(x)))


class TanhGate(Gated):
    def forward(self, x):
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class ReluGate(Gated):
    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


class QuickGelu(Gated):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(1.702 * gate) * self.up(x))


class SigmoidGate(Gated):
    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class LayerDrop(Gated):
    """Computes nothing, once in many calls."""

    def forward(self, x):
        return x if self.training and torch.rand(()) < 1e-6 else super().forward(x)


class LayerDropInPython(Gated):
    def forward(self, x):
        return x if self.training and random.random() < 1e-6 else super().forward(x)


class LayerDropInNumPy(Gated):
    def forward(self, x):
        return x if self.training and np.random.rand() < 1e-6 else super().forward(x)


class LayerDropOfItsOwn(Gated):
    kind = torch.Generator

    def start(self):
        self.generator = self.kind()

    def forward(self, x):
        return x if torch.rand((), generator=self.generator) < 1e-6 else super().forward(x)


class LayerDropOfPythonsOwn(LayerDropOfItsOwn):
    kind = random.Random

    def forward(self, x):
        return x if self.generator.random() < 1e-6 else Gated.forward(self, x)


class LayerDropOfNumPysOwn(LayerDropOfPythonsOwn):
    kind = staticmethod(np.random.default_rng)


class Counts(Gated):
    def start(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls > 1000 else super().forward(x)


class CountsInADictionary(Gated):
    def start(self):
        self.stats = {"calls": 0}

    def forward(self, x):
        self.stats["calls"] += 1
        return super().forward(x)


class Collects(Gated):
    def start(self):
        self.hidden = []

    def forward(self, x):
        self.hidden.append(self.gate(x))
        return super().forward(x)


class KeepsItsResult(Gated):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class EverySecondCall(Gated):
    """By a counter that no attribute shows."""

    def start(self):
        calls = itertools.cycle((False, True))
        self.drops = lambda: next(calls)

    def forward(self, x):
        return x if self.drops() else super().forward(x)


class StopsGradients(Gated):
    def forward(self, x):
        return super().forward(x.detach())


class StopsOneGradient(Gated):
    def forward(self, x):
        return self.down(F.silu(self.gate(x)).detach() * self.up(x))


class StraightThrough(Gated):
    def forward(self, x):
        y = super().forward(x)
        return x + (y - x).detach()


class WithoutGradients(Gated):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


NOT = [
    Dropout, NestedDropout, FunctionalDropout, Scaled, LayerScale, Buffered, Normed, NormedWithoutWeights, Residual,
    LargestHidden, LargestInput, LargestResult, LargestInTraining,
    Clamped, Offset, Mixes, OtherInEvaluation, NoisyInTraining, TwoResults, TwoArguments, Double, Summed, Raises, Twice,
    ThirdUnused, TanhGate, ReluGate, QuickGelu, SigmoidGate, LayerDrop, LayerDropInPython, LayerDropInNumPy,
    LayerDropOfItsOwn, LayerDropOfPythonsOwn, LayerDropOfNumPysOwn, Counts, CountsInADictionary, Collects,
    KeepsItsResult, EverySecondCall, StopsGradients, StopsOneGradient, StraightThrough, WithoutGradients,
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cls", NOT)
def test_what_computes_something_else(cls, training):
    assert find_mlp(cls().train(training)) is None


def test_biases_of_the_inner_layers():
    assert find_mlp(Gated(inner_bias=True)) is None and find_mlp(Plain(inner_bias=True)) is None
    module = Gated()
    module.up = nn.Linear(WIDTH, HIDDEN)
    assert find_mlp(module) is None


def test_layers_that_do_not_fit():
    module = Gated()
    module.up = nn.Linear(WIDTH, HIDDEN + 1, bias=False)
    assert find_mlp(module) is None
    assert find_mlp(nn.Sequential(nn.Linear(8, 8))) is None
    assert find_mlp(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))) is None
    assert find_mlp(nn.Linear(8, 8)) is None


def test_layers_that_are_parametrised():
    module = Gated()
    torch.nn.utils.parametrizations.weight_norm(module.up)
    assert find_mlp(module) is None


def test_a_forward_that_was_patched():
    module = Gated()
    module.forward = lambda x: x
    assert find_mlp(module) is None


def test_an_ordinary_sequence_is_an_mlp_too():
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 8))
    assert find_mlp(module) == MLPRoles("silu", ("0",), "2")


def test_a_compiled_forward_is_looked_at_as_it_is_written():
    class Compiled(Gated):
        forward = torch.compile(Gated.forward, backend=lambda *_: pytest.fail("compiled"))

    assert find_mlp(Compiled()) == MLPRoles("silu", ("gate", "up"), "down")


# --- looking changes nothing ----------------------------------------------------------------------------------------


def held(module):
    skipped = ("_modules", "_parameters")
    return {name: value for name, value in vars(module).items() if name not in skipped and "hooks" not in name}


@pytest.mark.parametrize(
    "cls", [Gated, Modules, Dropout, NoisyInTraining, Raises, LayerDropInNumPy, Counts, CountsInADictionary, Collects]
)
def test_looking_leaves_no_trace(cls):
    module, seen = cls(), []
    module.register_forward_hook(lambda *_: seen.append("module"))
    for child in module.modules():
        child.register_forward_hook(lambda *_: seen.append("child"))
    module.compile(backend=lambda *_: pytest.fail("compiled"))
    before = {name: (type(m), copy.deepcopy(held(m)), dict(m._modules)) for name, m in module.named_modules()}
    parameters = {name: (id(p), p._version, p.clone()) for name, p in module.named_parameters()}
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    find_mlp(module)
    assert not seen and np.random.get_state()[1].tolist() == numbers[2]
    assert {name: (type(m), held(m), dict(m._modules)) for name, m in module.named_modules()} == before
    assert all(parameters[n][:2] == (id(p), p._version) for n, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0]) and random.getstate() == numbers[1]


# --- layers that share an input -------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q = self.q(x).view(-1, 2)
        k = self.norm(self.k(x))
        v = self.v(x)
        return self.o(q.view(x.shape) + k + v)


class OneLine(Attention):
    def forward(self, x):
        return self.o(self.q(x) + self.k(x) * self.v(x).transpose(0, 1))


class OtherSelf(Attention):
    def forward(me, x):
        return me.q(x), me.k(x), me.v(x)


class Annotated(Attention):
    def forward(self, x: Tensor) -> Tensor:
        """With a docstring, an annotated assignment and one in place."""
        q: Tensor = self.q(x)
        q += self.k(x)
        return q + self.v(x)


class InWith(Attention):
    def forward(self, x):
        with contextlib.nullcontext():
            q, k = self.q(x), self.k(x)
        return q, k, self.v(x)


class HuggingFace(Attention):
    @decorated
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, 8)

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v(hidden_states).view(hidden_shape).transpose(1, 2)
        if attention_mask is not None:
            query_states = query_states + attention_mask
        attn_output = (query_states + key_states + value_states).reshape(*input_shape, -1)
        return self.o(attn_output), None


@pytest.mark.parametrize("cls", [Attention, OneLine, OtherSelf, Annotated, InWith, HuggingFace])
def test_three_calls_on_one_variable(cls):
    assert find_shared(cls()) == [("q", "k", "v")]


class Cross(Attention):
    def forward(self, x, memory):
        return self.o(self.q(x) + self.k(memory) + self.v(memory))


class CrossInto(Attention):
    def forward(self, x, memory):
        return self.q(x), self.o(x), self.k(memory), self.v(memory)


class Reassigned(Attention):
    def forward(self, x):
        q = self.q(x)
        x = self.norm(x)
        return q, self.k(x), self.v(x)


class ReassignedInPlace(Attention):
    def forward(self, x):
        q = self.q(x)
        x += 1
        return q, self.k(x), self.v(x)


class ReassignedInABranch(Attention):
    def forward(self, x, memory=None):
        q = self.q(x)
        if memory is not None:
            x = memory
        return q, self.k(x), self.v(x)


class ReassignedInAWith(Attention):
    def forward(self, x):
        with contextlib.nullcontext():
            q = self.q(x)
            x = self.norm(x)
            k = self.k(x)
        return q, k, self.v(x)


class ReassignedByAWith(Attention):
    def forward(self, x):
        q = self.q(x)
        with contextlib.nullcontext(x + 1) as x:
            return q, self.k(x), self.v(x)


class ReassignedByAWalrus(Attention):
    def forward(self, x):
        return self.q(x := self.norm(x)), self.o(1), self.k(x) + (self.v(x))


@pytest.mark.parametrize(
    ("cls", "groups"),
    [
        (Cross, [("k", "v")]),
        (CrossInto, [("q", "o"), ("k", "v")]),
        (Reassigned, [("k", "v")]),
        (ReassignedInPlace, [("k", "v")]),
        (ReassignedInABranch, [("k", "v")]),
        (ReassignedInAWith, [("k", "v")]),
        (ReassignedByAWith, [("k", "v")]),
        (ReassignedByAWalrus, [("k", "v")]),
    ],
)
def test_another_variable_or_another_value_is_another_group(cls, groups):
    assert find_shared(cls()) == groups


class InABranch(Attention):
    def forward(self, x, cached=False):
        q = self.q(x)
        if not cached:
            return q, self.k(x), self.v(x)
        return q


class InAnExpression(Attention):
    def forward(self, x, cached=False):
        return self.q(x), None if cached else self.k(x), cached or self.v(x)


class InALoop(Attention):
    def forward(self, x):
        for _ in range(2):
            q, k = self.q(x), self.k(x)
        while False:
            self.v(x)
        return q, k, [self.o(x) for _ in range(2)], lambda: self.v(x)


class Keyword(Attention):
    def forward(self, x):
        return self.q(input=x), self.k(input=x), self.v(x)


class CalledTwice(Attention):
    def forward(self, x):
        return self.q(x), self.k(x), self.q(x)


class OfAnother(Attention):
    def forward(self, x, other):
        return self.q(x), other.k(x), other.v(x)


class Indexed(Attention):
    def forward(self, x):
        return self.q(x[0]), self.k(x[1]), self.v(x[2])


@pytest.mark.parametrize("cls", [InABranch, InAnExpression, InALoop, Keyword, CalledTwice, OfAnother, Indexed])
def test_what_may_not_run_or_is_called_otherwise(cls):
    assert find_shared(cls()) == []


def test_modules_without_a_source():
    namespace = {"Attention": Attention}
    exec("class Made(Attention):\n    def forward(self, x):\n        return self.q(x), self.k(x)", namespace)
    assert find_shared(namespace["Made"]()) == []
    assert find_shared(nn.Linear(8, 8)) == find_shared(nn.Identity()) == find_shared(nn.Sequential()) == []

    class Lambda(Attention):
        forward = lambda self, x: (self.q(x), self.k(x))  # noqa: E731

    assert find_shared(Lambda()) == []


def test_a_fused_mlp_that_shares_is_read_in_the_users_source():
    class Written(Gated):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    module = Written()
    assert find_shared(module) == [("gate", "up")]
    convert(module)
    assert find_shared(module) == [("gate", "up")]


# --- in a plan, and carried out -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Gated()
        self.norm, self.other_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(8)
        self.unused = nn.RMSNorm(WIDTH + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def of(plan, name: str) -> FusionPattern | None:
    return next((structure for structure in plan.structures if structure.name == name), None)


def model() -> nn.Module:
    return nn.Sequential(Block(), Block())


def test_a_plan_says_what_is_computed_together():
    plan = make_plan(model())
    assert plan.structures[:4] == (
        FusionPattern(name="0.attention", kind="shared", layers=("q", "k", "v")),
        FusionPattern(name="0.attention.norm", kind="norm"),
        FusionPattern(name="0.mlp", kind="mlp", layers=("gate", "up", "down"), activation="silu"),
        FusionPattern(name="0.norm", kind="norm"),
    )
    assert str(plan).splitlines()[-4:] == [
        "*.attention (2): fused: q + k + v, their input quantised once",
        "*.attention.norm (2): fused: norm + quantise",
        "*.mlp (2): fused: gate + up + silu + down",
        "*.norm (2): fused: norm + quantise",
    ]
    assert str(make_plan(Gated())).splitlines()[-1].startswith("the model itself: fused: gate + up + silu")


def test_the_inputs_of_an_activation_may_be_kept_in_fp8_and_the_plan_says_so():
    policy, converted, other = Policy(activation_inputs="fp8"), model(), model()
    other.load_state_dict(converted.state_dict())
    plan = convert(converted, policy=policy)
    line = "*.mlp (2): fused: gate + up + silu + down; gate and up kept in FP8"
    assert line in str(plan).splitlines() and '"saved": "fp8"' in plan.to_json()
    assert converted[1].mlp.mlp_activation_inputs == "fp8"
    convert(other)
    x = torch.randn(5, WIDTH)
    losses = [each(x).square().mean() for each in (converted, other)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    pairs = list(zip(converted.parameters(), other.parameters(), strict=True))
    differ = [a.grad is not None and not torch.equal(a.grad, b.grad) for a, b in pairs]
    assert any(differ)
    assert make_plan(converted).structures == make_plan(other).structures  # the next conversion is by its own policy


def test_a_norm_that_no_fp8_layer_can_read_is_left_alone():
    plan = make_plan(model())
    assert of(plan, "0.other_norm") is of(plan, "0.unused") is None
    converted = model()
    convert(converted)
    assert isinstance(converted[0].norm, Norm) and type(converted[0].unused) is nn.RMSNorm


def test_converting_makes_it_so_and_reverting_undoes_it():
    block = model()
    before = {name: (type(m), dict(vars(m))) for name, m in block.named_modules()}
    names = list(block.state_dict())
    convert(block)
    attention, mlp = block[0].attention, block[0].mlp
    assert attention.q.shared is attention.k.shared is attention.v.shared is not None
    assert attention.q.shared is not block[1].attention.q.shared and attention.o.shared is None
    assert isinstance(mlp, FusedMLP) and mlp.mlp_roles == MLPRoles("silu", ("gate", "up"), "down")
    assert mlp.gate.shared is None
    assert list(block.state_dict()) == names
    revert(block)
    assert {name: (type(m), dict(vars(m))) for name, m in block.named_modules()} == before


def test_a_policy_switches_it_off():
    block = model()
    plan = convert(block, policy=Policy(fuse=False))
    assert plan.structures == () and plan.fp8_layers == 14
    assert str(plan).splitlines()[-1].startswith("14 of 14 linear layers in FP8")
    assert not any(isinstance(m, FusedMLP | Norm) or getattr(m, "shared", None) for m in block.modules())
    convert(block)
    assert isinstance(block[0].mlp, FusedMLP)
    convert(block, policy=Policy(fuse=False))
    assert not any(isinstance(m, FusedMLP | Norm) or getattr(m, "shared", None) for m in block.modules())


def test_without_fp8_nothing_is_touched():
    block = model()
    assert convert(block, "bf16").structures == ()
    assert not any(isinstance(m, FusedMLP | Norm | Linear) for m in block.modules())


def test_a_mistaken_router_in_an_mlp_is_its_gate():
    assert make_plan(model()).fp8_layers == 14
    kept = make_plan(model(), policy=Policy(keep={"*.gate": "mine"}))
    assert {layer.name for layer in kept.layers if not layer.is_fp8} == {"0.mlp.gate", "1.mlp.gate"}
    assert of(kept, "0.mlp") is None
    router = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(64, 64), "experts": Gated()})})
    assert [layer.name for layer in make_plan(router).layers if not layer.is_fp8] == ["mlp.gate"]


@pytest.mark.parametrize(
    ("modules", "shared", "fused"),
    [
        ({"*.q": "block"}, ("k", "v"), True),
        ({"*.k": "bf16", "*.o": "bf16"}, ("q", "v"), True),
        ({"*.k": "bf16", "*.q": "block"}, None, True),
        ({"*.down": "block"}, ("q", "k", "v"), True),
        ({"*.up": "block"}, ("q", "k", "v"), False),
        ({"*.down": "bf16"}, ("q", "k", "v"), False),
    ],
    ids=str,
)
def test_layers_of_different_recipes_are_not_computed_together(modules, shared, fused):
    plan = make_plan(model(), load({"modules": modules}))
    attention = of(plan, "0.attention")
    assert (attention and attention.layers) == shared
    assert (of(plan, "0.mlp") is not None) == fused


def test_gate_and_up_share_where_the_mlp_cannot_be_one():
    class Written(Gated):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    plan = make_plan(Written(), load({"wgrad": {"precision": "bf16"}}))
    assert plan.structures == (FusionPattern(name="", kind="shared", layers=("gate", "up")),)


def test_a_module_in_two_places_is_one():
    mlp = Gated()
    twice = nn.Sequential(mlp, nn.Identity(), mlp)
    plan = convert(twice)
    assert [structure.name for structure in plan.structures] == ["0"]
    assert isinstance(twice[2], FusedMLP)


def test_layers_in_two_modules_belong_to_the_first():
    first, second = Gated(), Gated()
    second.gate = first.gate
    holder = nn.ModuleList([first, second])
    plan = convert(holder)
    assert [structure.name for structure in plan.structures if structure.kind == "mlp"] == ["0"]
    assert isinstance(first, FusedMLP) and type(second) is Gated


def test_the_result_is_near_what_separate_layers_give():
    torch.manual_seed(1)
    block, x = model(), torch.randn(2, 7, WIDTH)
    exact = block(x)
    convert(block, policy=Policy(fuse=False))
    separate = block(x)
    convert(block)
    fused = block(x)
    assert (fused - separate).norm() < 0.02 * exact.norm()
    assert (fused - exact).norm() < 0.05 * exact.norm()


def test_disabled_computes_as_the_user_wrote_it():
    block, x = model(), torch.randn(2, 7, WIDTH)
    expected = block(x)
    convert(block)
    with disabled(block):
        assert torch.equal(block(x), expected)
    assert not torch.equal(block(x), expected)


def test_a_converted_model_compiles_as_a_whole_and_computes_the_same():
    block = model()
    convert(block)
    outcomes = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 14 * WIDTH).reshape(2, 7, WIDTH).requires_grad_()
        block.zero_grad()
        run(x).square().sum().backward()
        outcomes.append([x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
    assert len(outcomes[0]) == 1 + 2 * (8 + 2 + 3 + 1)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    torch._dynamo.reset()


# --- options of a policy that do nothing somewhere: the plan says so, and strict refuses ----------------------------

CONFIG = ModelConfig(vocab=64, dim=64, heads=4, layers=2, sequence=16, ffn=128)
OPTIONS = ("activation_inputs", "norm_inputs", "attention_output")
every_option = pytest.mark.parametrize("option", OPTIONS)


@every_option
def test_where_it_is_applied_nothing_is_said(option):
    plan = convert(Llama(CONFIG), policy=Policy(**{option: "fp8"}), strict=True)
    assert plan.unapplied == ()
    assert sum("kept in FP8" in structure.what for structure in plan.structures) == (
        5 if option == "norm_inputs" else 2
    )


@every_option
def test_a_model_without_such_a_module(option):
    model, policy = nn.Sequential(nn.Linear(64, 64)), Policy(**{option: "fp8"})
    plan = make_plan(model, policy=policy)
    assert len(plan.unapplied) == 1 and f"{option} = 'fp8' does nothing" in plan.unapplied[0]
    assert plan.unapplied[0] in str(plan) and json.loads(plan.to_json())["unapplied"] == list(plan.unapplied)
    with pytest.raises(UnsupportedError, match=f"{option} = 'fp8' does nothing"):
        convert(model, policy=policy, strict=True)
    convert(model, policy=policy)  # without strict it goes on


@pytest.mark.parametrize(
    ("recipe", "keep", "why"),
    [
        ("delayed", {}, "keeps scales from step to step"),
        ("rowwise_bf16_wgrad", {}, "leaves a GEMM in BF16"),
        ("folded", {"*w2": "for a test"}, "one of its layers stays in BF16"),
        ({"base": "folded", "modules": {"*w3": {"base": "block"}}}, {}, "its layers differ in their recipes"),
    ],
)
def test_an_mlp_that_is_not_computed_as_one(recipe, keep, why):
    policy = Policy(activation_inputs="fp8", keep=keep)
    plan = make_plan(Llama(CONFIG), recipe, policy=policy)
    assert [line.split(": ")[0].split()[-3] for line in plan.unapplied] == [
        "layers.0.feed_forward,",
        "layers.1.feed_forward,",
    ]
    assert all(why in line for line in plan.unapplied)


def test_low_memory_is_every_option_where_the_model_has_what_it_is_for():
    low = Policy(memory="low")
    assert low == Policy(memory="low", **dict.fromkeys(OPTIONS, "fp8"))
    assert str(make_plan(Llama(CONFIG), policy=low)) == str(
        make_plan(Llama(CONFIG), policy=Policy(**dict.fromkeys(OPTIONS, "fp8")))
    )
    plan = convert(nn.Sequential(nn.Linear(64, 64)), policy=low, strict=True)  # asks for what there is
    assert len(plan.unapplied) == 3
    with pytest.raises(ConfigError, match="memory = 'lowest': it is 'exact' or 'low'"):
        Policy(memory="lowest")


def test_nothing_is_said_without_the_options():
    assert make_plan(nn.Sequential(nn.Linear(64, 64))).unapplied == ()


@every_option
def test_values_and_contradictions_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option} = 'fp16'"):
        Policy(**{option: "fp16"})
    with pytest.raises(ConfigError, match="fuse = False"):
        Policy(**{option: "fp8"}, fuse=False)


def test_a_module_with_a_tensor_of_its_own_is_not_fused():
    """A write to it in place could not be noticed, and the fused formula has no such factor."""

    class Scaled(Gated):
        def start(self):
            self.factor = torch.ones(())

        def forward(self, x):
            return super().forward(x) * self.factor

    assert find_mlp(Gated()) is not None and find_mlp(Scaled()) is None

    class ScaledNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.factor = nn.Parameter(torch.rand(64)), 1e-6, torch.ones(())

        def forward(self, x):
            return F.rms_norm(x, (64,), self.weight, self.eps) * self.factor

    norm = ScaledNorm()
    assert not adopts(norm)
    del norm.factor
    norm.factor = 1.0
    assert adopts(norm)


def test_each_kind_of_module_is_probed_once_and_a_different_one_by_itself(monkeypatch):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.factor = nn.Parameter(torch.rand(64)), 1e-6, 1.0

        def forward(self, x):
            return F.rms_norm(x, (64,), self.weight, self.eps) * self.factor

    probes, computes = [], fusion_patterns.computes
    for module in (fusion_patterns, norms):
        monkeypatch.setattr(module, "computes", lambda *args: probes.append(args) or computes(*args))
    model = nn.ModuleList(make() for _ in range(4) for make in (Gated, Norm))
    assert [pattern.name for pattern in make_plan(model).structures] == [str(number) for number in range(8)]
    assert len(probes) == 3 + 2
    model[5].factor, model[2].activation = 2.0, F.logsigmoid
    patterns = make_plan(model).structures
    assert {pattern.name: pattern.kind for pattern in patterns if pattern.kind != "shared"} == {
        **dict.fromkeys("046", "mlp"), **dict.fromkeys("137", "norm")
    }  # fmt: skip
