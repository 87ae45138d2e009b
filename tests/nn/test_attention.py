"""Attention that keeps codes: forward and projection to the bit, the rest within a rounding, and fewer bytes."""

import copy

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.errors import UnsupportedError
from octavo.kernels.runtime import ledger
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.gpt import GPT
from octavo.lab.models.gpt import Attention as GPTAttention
from octavo.lab.models.llama import Attention, rotary_tables
from octavo.nn import attention as module
from octavo.nn.attached_codes import attached_codes
from octavo.numerics import sqnr_db
from octavo.recipes import load, names, reused_from

CONFIG = ModelConfig(vocab=64, dim=128, heads=4, kv_heads=2, layers=1, sequence=32, ffn=256)
TOKENS = 2 * CONFIG.sequence
POLICY = octavo.Policy(attention_output="fp8")
APPLIED = [n for n in names() if module.unsupported_reason(load(n), False) is None and not load(n).is_emulated]
SHARED = [n for n in APPLIED if module.shares_codes(load(n))]


class Block(nn.Module):
    """An attention of a Llama with its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(CONFIG)
        cos, sin = rotary_tables(CONFIG.head_dim, CONFIG.sequence, CONFIG.rope_theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.cos, self.sin)


def results(model: nn.Module, x: Tensor, run=None) -> tuple[dict[str, Tensor], int]:
    """The result and every gradient, and the bytes saved for backward, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (model if run is None else run)(x)
    y.float().square().sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    return found, sum(t.untyped_storage().nbytes() for t in kept.values())


def both(recipe="folded", policy=POLICY, **options) -> tuple[nn.Module, nn.Module, Tensor]:
    model = Block().bfloat16()
    plain, codes = copy.deepcopy(model), model
    octavo.convert(plain, recipe)
    octavo.convert(codes, recipe, policy=policy, **options)
    return plain, codes, torch.randn(2, CONFIG.sequence, CONFIG.dim).bfloat16()


# --- what it computes, and what it keeps ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHARED)
def test_the_forward_and_the_projection_stay_what_they_are(recipe):
    plain, codes, x = both(recipe)
    (want, much), (got, little) = results(plain, x), results(codes, x)
    assert torch.equal(got["y"], want["y"]) and torch.equal(got["attention.wo.weight"], want["attention.wo.weight"])
    for name in ("x", "attention.wq.weight", "attention.wk.weight", "attention.wv.weight"):
        assert 20 < sqnr_db(want[name], got[name]) < 80, name
    if load(recipe).plan.requantises_exactly:  # kept once either way: the output, or codes of it
        assert much - little == TOKENS * CONFIG.dim
    elif reused_from(load(recipe), "wgrad", "input"):  # the codes are wo's own: the output itself is saved
        assert much - little == 2 * TOKENS * CONFIG.dim
    else:
        assert 0.9 * TOKENS * CONFIG.dim < much - little < TOKENS * CONFIG.dim


STOCHASTIC = {"fprop": {"input": {"rounding": "stochastic"}}, "wgrad": {"input": {"granularity": "row"}}}


@pytest.mark.parametrize("recipe", ["delayed", STOCHASTIC], ids=str)
def test_codes_of_its_own_where_the_readers_cannot_be_known(recipe):
    plain, codes, x = both(recipe)
    core = codes.attention.core
    assert not core.shares and core.target == module.OWN
    torch.manual_seed(1)
    want, much = results(plain, x)
    torch.manual_seed(1)
    got, little = results(codes, x)
    assert torch.equal(got["y"], want["y"])
    assert much - little == 2 * TOKENS * CONFIG.dim - TOKENS * (CONFIG.dim + 4)


def test_autocast():
    model = Block()
    plain = copy.deepcopy(model)
    octavo.convert(plain, "folded")
    octavo.convert(model, "folded", policy=POLICY)
    x = torch.randn(2, CONFIG.sequence, CONFIG.dim)
    with torch.autocast("cpu", torch.bfloat16):
        want, much = results(plain, x)
        got, little = results(model, x)
    assert got["y"].dtype == torch.bfloat16 and torch.equal(got["y"], want["y"])
    assert much - little == TOKENS * CONFIG.dim
    assert sqnr_db(want["x"], got["x"]) > 25


def test_queries_keys_and_values_of_one_layer():
    config = ModelConfig(architecture="gpt", vocab=64, dim=128, heads=4, layers=1, sequence=32)
    plain, x = GPTAttention(config).bfloat16(), torch.randn(2, 32, 128).bfloat16()
    codes = copy.deepcopy(plain)
    octavo.convert(plain, "folded")
    octavo.convert(codes, "folded", policy=POLICY)
    (want, much), (got, little) = results(plain, x), results(codes, x)
    assert torch.equal(got["y"], want["y"]) and much - little == TOKENS * 128
    assert sqnr_db(want["wqkv.weight"], got["wqkv.weight"]) > 25


@pytest.mark.parametrize("recipe", ["folded", pytest.param("block", marks=pytest.mark.slow)])
def test_compiled_code_keeps_the_codes_once(recipe):
    plain, codes, x = both(recipe)
    eager, _ = results(codes, x)
    sizes = []
    for model in (plain, codes):
        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        got, size = results(model, x, compiled)
        sizes.append(size)
    assert all(torch.equal(got[name], eager[name]) for name in got)
    if recipe == "block":  # codes of its own
        assert 0.9 * TOKENS * CONFIG.dim < sizes[0] - sizes[1] < TOKENS * CONFIG.dim
    else:
        assert sizes[0] - sizes[1] == TOKENS * CONFIG.dim
    torch._dynamo.reset()


# --- where it is not ------------------------------------------------------------------------------------------------


def test_the_result_can_be_written_to():
    attention = module.ScaledDotProduct("o")
    attention.keep_codes(load("folded"))
    q, k, v = (torch.randn(2, 5, 4, 16, requires_grad=True) for _ in range(3))
    found = []
    for y in (attention(q, k, v) * 2, attention(q, k, v).mul_(2)):
        found.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_kept_without_gradients_or_when_disabled():
    plain, codes, x = both()
    with torch.no_grad():
        assert torch.equal(plain(x), codes(x))
    want, much = results(plain, x)
    codes.attention.core.enabled = False
    got, size = results(codes, x)
    assert size == much + TOKENS * CONFIG.dim  # the output beside the codes that wo keeps
    assert all(torch.equal(got[name], want[name]) for name in want)
    codes.attention.core.enabled = True
    with octavo.disabled(codes), octavo.disabled(plain):
        (want, much), (got, size) = results(plain, x), results(codes, x)
    assert size == much and all(torch.equal(got[name], want[name]) for name in want)


def test_revert_and_converting_anew():
    plain, codes, x = both()
    octavo.convert(codes, "folded")
    assert codes.attention.core.target is None
    (want, much), (got, size) = results(plain, x), results(codes, x)
    assert size == much and all(torch.equal(got[name], want[name]) for name in want)
    octavo.convert(codes, policy=POLICY)
    assert "output kept as e4m3 row" in repr(codes)
    octavo.revert(codes)
    assert codes.attention.core.target is None


def test_other_tensors_are_left_to_pytorch_aloud():
    class Other(torch.Tensor):
        pass

    _, codes, _ = both()
    q = torch.randn(1, 4, 4, 32, requires_grad=True)
    with ledger.record() as record:
        codes.attention.core(q.as_subclass(Other), q, q)
    assert "attention kept its output as it is" in record.fallbacks[0]


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_says_where():
    model = GPT(ModelConfig(architecture="gpt", vocab=64, dim=128, heads=4, layers=2, sequence=32))
    plan = octavo.plan(model, "folded", policy=POLICY)
    assert "layers.*.attention.core (2): output kept in FP8: the codes that wo keeps" in str(plan)
    assert plan.unapplied == ()
    assert "codes of its own, beside those of wo" in str(octavo.plan(model, "block", policy=POLICY))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"keep": {"*wo": "for a test"}}, "it keeps its input in BF16"),
        ({"requantise": ("*wo",)}, "`requantise` has it keep its input"),
    ],
)
def test_where_it_would_save_nothing_the_plan_says_so_and_strict_refuses(options, why):
    model, policy = Block().bfloat16(), octavo.Policy(attention_output="fp8", **options)
    plan = octavo.convert(model, policy=policy)
    assert len(plan.unapplied) == 1 and why in plan.unapplied[0] and plan.unapplied[0] in str(plan)
    assert "attention.core" in plan.unapplied[0] and model.attention.core.target is None
    with pytest.raises(UnsupportedError, match=r"does nothing in attention\.core"):
        octavo.convert(model, policy=policy, strict=True)


def test_attention_that_is_nobodys():
    model = nn.Sequential(nn.Linear(64, 64))
    plan = octavo.plan(model, policy=POLICY)
    assert len(plan.unapplied) == 1 and "octavo.nn.ScaledDotProduct" in plan.unapplied[0]


@pytest.mark.parametrize("write", [lambda y: y.data.mul_(3), lambda y: torch._foreach_mul_([y.data], 3.0)])
def test_a_result_that_is_written_to_is_quantised_again(write):
    core = module.ScaledDotProduct("out")
    core.keep_codes(load("folded"))
    q, k, v = (torch.randn(2, 8, 2, 16, requires_grad=True) for _ in range(3))
    y = core(q, k, v)
    assert attached_codes(y, core.target) is not None
    write(y)
    assert attached_codes(y, core.target) is None
