"""Layers that quantise their input again in backward: the same results to the bit, and no codes kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.lab.models import build
from octavo.lab.models.config import ModelConfig
from octavo.nn.attached_codes import InputCodes
from octavo.nn.functional import Quantizer, linears, quantize_operand
from octavo.nn.mlp import mlp, unsupported_reason
from octavo.recipes import load, names

RECIPES = [name for name in names() if load(name).is_fp8 and not load(name).has_stored_scales]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def run(call, keeps_input: bool, leaves: list[torch.Tensor]):
    """Return the result, the gradients of all leaves, and every tensor that was saved for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = call(keeps_input)
    for leaf in leaves:
        leaf.grad = None
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)], saved


def codes_of_tokens(saved: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the codes of the input, of 40 tokens or 3 times that, and not those of weights."""
    return [t for t in saved if t.element_size() == 1 and not {40, 120}.isdisjoint(t.shape)]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def quantizer(recipe: str, keeps_input: bool) -> Quantizer:
    return Quantizer(load(recipe), torch.bfloat16, keeps_input=keeps_input)


@every_recipe
def test_layers_that_share_an_input(recipe):
    x, weights = leaf(3, 40, 136), [leaf(64, 136), leaf(48, 136)]

    def call(keeps_input):
        return torch.cat(linears(x, weights, [None, None], quantizer(recipe, keeps_input)), dim=-1)

    want, codes = run(call, False, [x, *weights])
    got, kept = run(call, True, [x, *weights])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert any(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in kept)
    if load(recipe).wgrad.is_fp8:
        assert codes_of_tokens(codes)
    assert not codes_of_tokens(kept)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if unsupported_reason(load(name), load(name)) is None])
def test_an_mlp(recipe):
    x, gate, up, down = leaf(40, 136), leaf(72, 136), leaf(72, 136), leaf(136, 72)

    def call(keeps_input):
        return mlp(x, [gate, up, down], "silu", (quantizer(recipe, keeps_input), quantizer(recipe, False)))

    want, _ = run(call, False, [x, gate, up, down])
    got, kept = run(call, True, [x, gate, up, down])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not codes_of_tokens(kept)


@pytest.mark.parametrize(
    "recipe", ["folded", "block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rowwise", "tensorwise"))]
)
def test_compiled_as_in_eager(recipe):
    torch._dynamo.reset()  # recipes count as recompilations of one function
    x, weights = leaf(40, 136), [leaf(64, 136)]
    quantizers = [quantizer(recipe, keeps_input) for keeps_input in (False, True)]

    def call(keeps_input):
        return linears(x, weights, [None], quantizers[int(keeps_input)])[0]

    want, _ = run(call, True, [x, *weights])
    got, kept = run(torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition"), True, [x, *weights])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not codes_of_tokens(kept)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(torch.tanh(self.wq(x)))


def test_a_policy_names_them():
    model = Attention()
    plan = octavo.convert(model, policy=octavo.Policy(requantise=("*wo",)))
    assert model.wo.keeps_input and not model.wq.keeps_input
    assert [row.keeps_input for row in plan.layers] == [False, True]
    assert "keeps its input" in str(plan) and '"keeps_input": true' in plan.to_json()
    model(torch.randn(8, 64)).sum().backward()
    octavo.revert(model)
    assert not hasattr(model.wo, "keeps_input")


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wk, self.wv = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wk(x) + self.wv(x)


@pytest.mark.parametrize(("named", "keeps"), [(("*wv",), False), (("*wk", "*wv"), True)])
def test_layers_that_share_an_input_keep_it_if_all_are_named(named, keeps):
    model = Projections()
    octavo.convert(model, policy=octavo.Policy(requantise=named))
    assert model.wk.shared is model.wv.shared and [model.wk.keeps_input, model.wv.keeps_input] == [keeps, keeps]
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(x := torch.randn(40, 64))
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in saved) == keeps
    assert bool(codes_of_tokens(saved)) != keeps


@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
def test_what_attention_keeps_anyway_is_kept_once(recipe):
    """The same gradients to the bit, and one tensor in place of two; only where codes follow from values and scale."""
    config = ModelConfig(vocab=64, dim=64, heads=4, layers=1, sequence=16)
    tokens = torch.randint(64, (2, 16))
    found = []
    for keeps in (True, False):
        model = build(config, seed=0).bfloat16()
        plan = octavo.convert(model, recipe)
        layers = {row.name: row for row in plan.layers if row.is_fp8}
        assert [name for name, row in layers.items() if row.keeps_input] == (
            ["layers.0.attention.wo"] if recipe == "folded" else []
        )
        model.layers[0].attention.wo.keeps_input &= keeps
        model(tokens, tokens).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("recipe", "patterns", "said"),
    [
        ("folded", ("*w0",), r"requantise: the pattern '\*w0' matches no linear layer"),
        ("delayed", ("*",), "other codes when it is quantised again"),
        ({"base": "rowwise", "wgrad": {"input": {"rounding": "stochastic"}}}, ("*",), "other codes"),
    ],
)
def test_what_would_not_be_the_same_is_refused(recipe, patterns, said):
    with pytest.raises(ConfigError, match=said):
        octavo.convert(Attention(), recipe, policy=octavo.Policy(requantise=patterns))


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block", "rotated"])
def test_codes_that_a_norm_made_before_it_rounded_are_left_alone(recipe):
    """What backward makes of the rounded input must be what fprop read: else a folded scale may be off by two."""
    x, weight = leaf(40, 136), leaf(64, 136)
    wider = x.detach().float() * 2.01
    plan = load(recipe).plan
    ready = InputCodes(*(target and quantize_operand(wider, target) for target in (plan.x, plan.x_second)))

    def call(given):
        return linears(x, [weight], [None], quantizer(recipe, True), given)[0]

    want, _ = run(lambda _: call(None), True, [x, weight])
    got, _ = run(lambda _: call(ready), True, [x, weight])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def _attend(x, weights, layer, change):
    """Return the attention of x as transformers write it, its result changed, and read by a layer."""
    q, k, v = (F.linear(x, w).unflatten(-1, (4, 32)).transpose(1, 2) for w in weights)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return layer(change(y.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1)))


@pytest.mark.parametrize(
    ("recipe", "change"),
    [("folded", "nothing"), ("folded", "times 2"), pytest.param("block", "nothing", marks=pytest.mark.slow)],
)
def test_compiled_readers_of_anyone_s_attention_keep_its_output_as_it_does(recipe, change):
    x, weights, layer = leaf(3, 40, 128), [leaf(128, 128) for _ in range(3)], nn.Linear(128, 64).bfloat16()
    leaves = [x, *weights, layer.weight]
    octavo.nn.Linear.adopt(layer, load(recipe))
    changed = {"nothing": lambda y: y, "times 2": lambda y: y * 2}[change]
    torch._dynamo.reset()
    compiled = torch.compile(_attend, backend="aot_eager_decomp_partition", fullgraph=True)
    want, _ = run(lambda _: _attend(x, weights, layer, changed), False, leaves)
    got, kept = run(lambda _: compiled(x, weights, layer, changed), False, leaves)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert bool(codes_of_tokens(kept)) == ((recipe, change) != ("folded", "nothing"))
    torch._dynamo.reset()
