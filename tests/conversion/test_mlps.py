"""MLPs in a user's modules: every way to write one is recognised, and nothing that only looks so."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from user_modules import decorated

from octavo.conversion import convert
from octavo.conversion.mlps import find_mlp, find_mlps
from octavo.nn.fused import FusedMLP, MLPRoles

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


@pytest.mark.covering(1)
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


@pytest.mark.covering(1)
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


class Merged(Gated):
    """Fewer products than the formula has."""

    def forward(self, x):
        gate, up = F.linear(x, torch.cat((self.gate.weight, self.up.weight))).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Decorated(Gated):
    @decorated
    def forward(self, hidden_states: Tensor, flag: bool = False) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("cls", [UpFirst, ByHand, Modules, Swapped, Casts, Merged, Decorated])
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


# Values, gradients and attributes of these are those of an MLP; what else they do would be lost.


class Checkpointed(Gated):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedByReentering(Gated):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class CheckpointedTiles(Checkpointed):
    """A single tile, for small inputs."""

    def forward(self, x):
        return torch.cat([super(CheckpointedTiles, self).forward(tile) for tile in x.split(64, dim=-2)], dim=-2)


class CheckpointedIfLong(Gated):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if x.numel() > 4096 else super().forward(x)


class Compresses(Gated):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float):
            return super().forward(x)


class Offloads(Gated):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Tiles(Gated):
    """A long hidden tensor never exists as a whole."""

    def forward(self, x):
        return torch.cat([super(Tiles, self).forward(tile) for tile in x.split(1024, dim=-2)], dim=-2)


class Chunks(Gated):
    def forward(self, x, chunk=2):
        parts = [self.down(F.silu(self.gate(part)) * self.up(part)) for part in x.split(chunk)]
        return torch.cat(parts)


class CallsUpTwice(Gated):
    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * (self.up(x) + self.up(x)) / 2)


class Single(Gated):
    """FP32 for whatever reads it, as a loss does."""

    def forward(self, x):
        return super().forward(x).float()


class SingleUnderAutocast(Gated):
    def forward(self, x):
        return super().forward(x).to(x.dtype)


class ComputesInSingle(Gated):
    def forward(self, x):
        gate, up = (F.linear(x.float(), layer.weight.float()) for layer in (self.gate, self.up))
        return F.linear(F.silu(gate) * up, self.down.weight.float()).to(x.dtype)


class WithoutAutocast(Gated):
    device = "cpu"

    def forward(self, x):
        with torch.autocast(self.device, enabled=False):
            return super().forward(x.float()).to(self.down.weight.dtype)


class WithoutAutocastOfGPUs(WithoutAutocast):
    device = "cuda"

    def forward(self, x):
        with torch.autocast(self.device, enabled=False):
            return Gated.forward(self, x)


class Autocasts(Gated):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).to(x.dtype)


class ClampsHalf(Gated):
    """In 16 bits only."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.dtype == torch.float32 else y.clamp(-1, 1)


class OtherWithoutBatch(Gated):
    def forward(self, x):
        return super().forward(x) if x.dim() > 2 else super().forward(x) * 2


class OtherForOneToken(Gated):
    def forward(self, x):
        return super().forward(x) * (1 if x.shape[:-1].numel() > 1 else 2)


class OtherIfEmpty(Gated):
    def forward(self, x):
        return super().forward(x) if x.numel() else x.new_zeros(1, x.shape[-1])


class Transposed(Gated):
    """The layout of its result is another one."""

    def forward(self, x):
        return super().forward(x).mT.contiguous().mT


class Marked(Tensor):
    pass


class OfASubclass(Gated):
    def forward(self, x):
        return super().forward(x).as_subclass(Marked)


class SaysSomething(Gated):
    """By an attribute of its result, as parallel layers do."""

    def forward(self, x):
        y = super().forward(x)
        y.is_partial = True
        return y


class ClipsGradients(Gated):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1e4, 1e4))
        return y


class ClipsHiddenGradients(Gated):
    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        if h.requires_grad:
            h.register_hook(lambda dh: dh.clamp(-1e4, 1e4))
        return self.down(h)


class KeepsAGradient(Gated):
    def start(self):
        self.seen = {}

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: self.seen.update(dy=dy))
        return y


class ChangesItsInput(Gated):
    def forward(self, x):
        with torch.no_grad():
            x.mul_(2).div_(2)
        return super().forward(x)


class IntoItsInput(Gated):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        return x.copy_(super().forward(x))


class ClampsWeights(Gated):
    """Those of its copies are within the bounds."""

    def forward(self, x):
        self.down.weight.data.clamp_(-100, 100)
        return super().forward(x)


class StopsAtNaN(Gated):
    def forward(self, x):
        y = super().forward(x)
        if y.isnan().any():
            raise FloatingPointError
        return y


class Prints(Gated):
    def forward(self, x):
        print("an MLP of", x.shape)
        return super().forward(x)


def say(x):
    print(x.shape)


class PrintsInAFunction(Gated):
    def forward(self, x):
        say(x)
        return super().forward(x)


CALLS, SEEN, ALL, NUMBERED = {"calls": 0}, [], torch.zeros(()), itertools.count()
TOTAL = 0


class CountsInAGlobal(Gated):
    def forward(self, x):
        CALLS["calls"] += 1
        return super().forward(x)


class CountsGlobally(Gated):
    def forward(self, x):
        global TOTAL
        TOTAL += x.shape[0]
        return super().forward(x)


class CollectsGlobally(Gated):
    def forward(self, x):
        SEEN.append(x.shape)
        return super().forward(x)


class SumsGlobally(Gated):
    def forward(self, x):
        ALL.add_(x.shape[0])
        return super().forward(x)


class Numbers(Gated):
    def forward(self, x):
        next(NUMBERED)
        return super().forward(x)


class CountsInItsClass(Gated):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class Statistics:
    def __init__(self) -> None:
        self.calls = 0


class CountsInAnObject(Gated):
    def start(self):
        self.statistics = Statistics()

    def forward(self, x):
        self.statistics.calls += 1
        return super().forward(x)


def counting(forward):
    calls = 0

    def wrapper(self, x):
        nonlocal calls
        calls += 1
        return forward(self, x)

    return wrapper


class CountsInAClosure(Gated):
    forward = counting(Gated.forward)


BESIDES = [
    Checkpointed, CheckpointedByReentering, CheckpointedTiles, CheckpointedIfLong, Compresses, Offloads, Tiles, Chunks,
    CallsUpTwice, Single, SingleUnderAutocast, ComputesInSingle, WithoutAutocast, WithoutAutocastOfGPUs, Autocasts,
    ClampsHalf, OtherWithoutBatch, OtherForOneToken, OtherIfEmpty, Transposed, OfASubclass, SaysSomething,
    ClipsGradients, ClipsHiddenGradients, KeepsAGradient, ChangesItsInput, IntoItsInput, ClampsWeights, StopsAtNaN,
    Prints, PrintsInAFunction, CountsInAGlobal, CountsGlobally, CollectsGlobally, SumsGlobally, Numbers,
    CountsInItsClass, CountsInAnObject, CountsInAClosure,
]  # fmt: skip


@pytest.mark.parametrize("cls", BESIDES)
def test_what_does_something_besides(cls, capsys):
    assert find_mlp(cls()) is None
    assert capsys.readouterr().out == ""


class RefusesTwoDimensions(Gated):
    def forward(self, x):
        batch, tokens, width = x.shape
        return super().forward(x.view(-1, width)).view(batch, tokens, width)


def test_a_shape_that_a_module_refuses_says_nothing():
    assert find_mlp(RefusesTwoDimensions()) == MLPRoles("silu", ("gate", "up"), "down")


def test_layers_of_different_dtypes():
    """As the last one of T5 stays in FP32, whose result is then FP32."""
    module = Gated().bfloat16()
    module.down.float()
    assert find_mlp(module) is None
    model = nn.ModuleList([Gated().bfloat16(), module])
    assert list(find_mlps(model)) == ["0"]


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    return sum(saved.values())


@pytest.mark.parametrize("cls", [Checkpointed, CheckpointedTiles, Single, SingleUnderAutocast])
def test_converted_modules_keep_their_dtype_and_save_no_more(cls):
    module, x = cls().bfloat16(), torch.randn(2, 256, WIDTH).bfloat16()
    before, dtype = saved_bytes(module, x.requires_grad_()), module(x).dtype
    convert(module)
    assert module(x).dtype == dtype and saved_bytes(module, x) <= before


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


class WithSlot(Plain):
    """Its activation may be in a slot, which copies lack."""

    __slots__ = ("chosen",)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.layers
        return down(getattr(self, "chosen", F.silu)(up(x)))


def test_a_module_with_slots_is_not_taken_for_what_its_copy_computes():
    module = WithSlot()
    module.chosen = F.gelu
    assert find_mlp(module) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_one_layer_in_two_roles_is_not_taken_for_two_layers(is_first):
    """Shapes and settings are those of an MLP with a layer per role."""
    tied, model = Gated(), nn.ModuleList([Gated()])
    tied.up = tied.gate
    model.insert(0 if is_first else 1, tied)
    assert find_mlp(tied) is None
    assert [model.get_submodule(name) is tied for name in find_mlps(model)] == [False]


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
