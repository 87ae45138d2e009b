"""Experts of every library are found, converted and turned back; names, values and routers stay."""

import copy
import importlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.conversion.experts import find_experts
from octavo.errors import NonFiniteError, UnsupportedError
from octavo.kernels import record
from octavo.lab.models import ModelConfig, build
from octavo.lab.sensitivity.precision_switch import switchable
from octavo.nn.experts import Experts
from octavo.numerics import sqnr_db

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "num_experts_per_tok": 2, "eos_token_id": None}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "mixtral.Mixtral": {"num_local_experts": 4},
    "qwen3_moe.Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16},
    "olmoe.Olmoe": {"num_experts": 8},
    "gpt_oss.GptOss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v3.DeepseekV3": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 2},
        **{"topk_group": 1, **MLA},
    },
}


def family(name):
    file, _, prefix = name.partition(".")
    module = importlib.import_module(f"transformers.models.{file}")
    config = getattr(module, f"{prefix}Config")(**SIZES, **FAMILIES[name])
    torch.manual_seed(0)
    return getattr(module, f"{prefix}ForCausalLM")(config).eval()


class Titan(nn.Module):
    """torchtitan's GroupedExperts."""

    def __init__(self, experts=4, dim=32, hidden=48):
        super().__init__()
        self.num_experts = experts
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / 6)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / 7)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim) / 6)

    def forward(self, x, num_tokens_per_expert):
        parts = torch.split(x, num_tokens_per_expert.tolist(), dim=0)
        outputs = []
        for e, part in enumerate(parts):
            h = F.silu(part @ self.w1[e].transpose(-2, -1)) * (part @ self.w3[e].transpose(-2, -1))
            outputs.append(h @ self.w2[e].transpose(-2, -1))
        return torch.cat(outputs, dim=0)


class Interleaved(nn.Module):
    """Transposed weights, gate and up in turns, GELU."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 96) / 6)
        self.down = nn.Parameter(torch.randn(4, 48, 32) / 7)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            h = x[t] @ self.up[e]
            y = y.index_add(0, t, (F.gelu(h[:, ::2]) * h[:, 1::2]) @ self.down[e] * weights[t, k, None])
        return y


class Biased(Interleaved):
    """With a bias behind each product, that of gate and up in turns too."""

    def __init__(self):
        super().__init__()
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(4, 96)), nn.Parameter(torch.randn(4, 32))

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            t, k = torch.where(ids == e)
            h = x[t] @ self.up[e] + self.up_bias[e]
            h = (F.gelu(h[:, ::2]) * h[:, 1::2]) @ self.down[e] + self.down_bias[e]
            y = y.index_add(0, t, h * weights[t, k, None])
        return y


class Ungated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 48, 32) / 6), nn.Parameter(torch.randn(4, 32, 48) / 7)

    def forward(self, tokens, experts, scores):
        hidden = F.relu(torch.einsum("td,ehd->teh", tokens, self.up)).square()
        every = torch.einsum("teh,edh->ted", hidden, self.down)
        dense = torch.zeros(len(tokens), 4).scatter(1, experts, scores)
        return (every * dense[:, :, None]).sum(1)


class Other(Ungated):
    """Not a mixture of experts: it adds the tokens."""

    def forward(self, tokens, experts, scores):
        return super().forward(tokens, experts, scores) + tokens


class Dropping(Interleaved):
    """Not a mixture of experts: each expert drops the tokens over its capacity."""

    def __init__(self, factor=1.25, least=0):
        super().__init__()
        self.factor, self.least = factor, least

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        capacity = max(self.least, math.ceil(self.factor * ids.numel() / 4))
        for e in range(4):
            t, k = (each[:capacity] for each in torch.where(ids == e))
            h = x[t] @ self.up[e]
            y = y.index_add(0, t, (F.gelu(h[:, ::2]) * h[:, 1::2]) @ self.down[e] * weights[t, k, None])
        return y


class OfTwo(Interleaved):
    """For two experts per token only."""

    top_k = 2

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            (places,) = torch.where(ids.flatten() == e)
            t, h = places // self.top_k, x[places // self.top_k] @ self.up[e]
            h = (F.gelu(h[:, ::2]) * h[:, 1::2]) @ self.down[e]
            y = y.index_add(0, t, h * weights.flatten()[places, None])
        return y


class LargestHidden(Ungated):
    """Not a mixture of experts: only the 20 largest hidden numbers count, of 48."""

    def forward(self, tokens, experts, scores):
        hidden = F.relu(torch.einsum("td,ehd->teh", tokens, self.up)).square()
        least = hidden.topk(min(20, hidden.shape[-1]), -1).values[..., -1:]
        hidden = torch.where(hidden >= least, hidden, 0)
        every = torch.einsum("teh,edh->ted", hidden, self.down)
        dense = torch.zeros(len(tokens), 4).scatter(1, experts, scores)
        return (every * dense[:, :, None]).sum(1)


class LargestInput(Ungated):
    """Not a mixture of experts: only the 16 largest numbers of a token count, of 32."""

    def forward(self, tokens, experts, scores):
        least = tokens.topk(min(16, tokens.shape[-1]), -1).values[..., -1:]
        return super().forward(torch.where(tokens >= least, tokens, 0), experts, scores)


class Checkpointed(Interleaved):
    """It keeps nothing of its hidden tensors for backward."""

    def forward(self, x, ids, weights):
        return checkpoint(super().forward, x, ids, weights, use_reentrant=False)


class CheckpointedExperts(Interleaved):
    """One expert at a time."""

    def forward(self, x, ids, weights):
        def expert(e):
            t, k = torch.where(ids == e)
            h = x[t] @ self.up[e]
            return t, (F.gelu(h[:, ::2]) * h[:, 1::2]) @ self.down[e] * weights[t, k, None]

        y = torch.zeros_like(x)
        for e in range(4):
            y = y.index_add(0, *checkpoint(expert, e, use_reentrant=False))
        return y


class Single(Interleaved):
    """Its result is FP32, whatever x is."""

    def forward(self, x, ids, weights):
        return super().forward(x, ids, weights).float()


TOKENS_SEEN = []


class Counting(Interleaved):
    def forward(self, x, ids, weights):
        TOKENS_SEEN.append(ids.flatten().bincount().tolist())
        return super().forward(x, ids, weights)


@pytest.mark.parametrize("cls", [Checkpointed, CheckpointedExperts, Single, Counting])
def test_experts_that_do_something_besides_are_left_alone(cls):
    assert find_experts(Interleaved()) and not find_experts(cls())


def compare(model, converted, run, floor):
    """Compare outputs and gradients of a model before and after conversion."""
    wide, fp8 = run(model), run(converted)
    wide.square().mean().backward()
    fp8.square().mean().backward()
    assert octavo.numerics.sqnr_db(wide.detach(), fp8.detach()) > floor
    for (name, a), b in zip(model.named_parameters(), converted.parameters(), strict=True):
        if a.grad is not None and a.grad.any():
            assert octavo.numerics.sqnr_db(a.grad, b.grad) > floor - 8, name


@pytest.mark.parametrize("name", FAMILIES)
def test_of_transformers(name):
    model = family(name)
    converted, tokens = copy.deepcopy(model), torch.randint(64, (2, 8))
    plan = octavo.convert(converted)
    rows = {row.name: row for row in plan.layers if row.count > 1}
    assert len(rows) == (2 if "deepseek" in name else 4)
    assert all(row.is_fp8 and row.kind == f"{row.count} experts" for row in rows.values())
    how = "GEMM by GEMM: an activation of its own" if "gpt" in name else "fused: sort, gate, up, silu, down, sum"
    assert {row.reason for row in rows.values()} == {how}
    assert list(converted.state_dict()) == list(model.state_dict())
    routers = [m for n, m in converted.named_modules() if n.endswith((".gate", ".router"))]
    assert routers and not any("octavo" in type(m).__module__ for m in routers)
    wide, fp8 = (m(input_ids=tokens, use_cache=False).logits.detach() for m in (model, converted))
    assert octavo.numerics.sqnr_db(wide, fp8) > 12  # a token near a tie goes to another expert
    converted(input_ids=tokens, labels=tokens).loss.backward()
    assert octavo.revert(converted) == plan.fp8_layers
    assert [type(m) for m in converted.modules()] == [type(m) for m in model.modules()]


def routed():
    torch.manual_seed(2)
    weights, ids = torch.randn(40, 4).softmax(1).topk(2)
    return torch.randn(40, 32), ids, weights


@pytest.mark.parametrize(
    "make",
    [
        *(partial(Dropping, factor) for factor in (1.0, 1.25, 2.0, 3.0)),
        partial(Dropping, 1.25, 8),
        LargestHidden,
        LargestInput,
    ],
)
def test_experts_that_drop_something_are_none(make):
    model = nn.ModuleDict({"experts": make()})
    plan = octavo.convert(model)
    assert plan.fp8_layers == 0 and not isinstance(model["experts"], Experts)
    assert "is not recognised as experts" in plan.unconverted[0].reason


@pytest.mark.parametrize("kind", [Interleaved, Biased, Ungated, OfTwo])
@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
def test_of_a_reader(kind, recipe):
    model = nn.ModuleDict({"experts": kind()})
    converted = copy.deepcopy(model)
    assert octavo.convert(converted, recipe).fp8_layers == 2
    compare(model, converted, lambda m: m["experts"](*routed()), 22)


@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
def test_of_torchtitan(recipe):
    model = nn.ModuleDict({"experts": Titan()})
    converted, counts = copy.deepcopy(model), torch.tensor([7, 0, 30, 3])
    plan = octavo.convert(converted, recipe)
    assert [row.shape for row in plan.layers] == [(96, 32), (32, 48)]
    compare(model, converted, lambda m: m["experts"](routed()[0], num_tokens_per_expert=counts), 22)


def test_a_gain_is_predicted_where_it_is_known_how_many_experts_a_token_has():
    shape = {"architecture": "moe", "vocab": 32, "layers": 1, "heads": 2, "sequence": 8, "experts": 4}
    for dim, gains in ((64, 0), (512, 1)):
        model = build(ModelConfig(**shape, dim=dim, ffn=dim, experts_per_token=2), 0)
        rows = [row for row in octavo.plan(model, tokens=2**15, device="h200").layers if row.is_experts]
        assert [row.active for row in rows] == [0.5, 0.5]
        assert len({row.gain for row in rows} - {None}) == gains
    assert not any(row.gain for row in octavo.plan(nn.ModuleDict({"experts": Titan()}), device="h200").layers)


def test_what_stays_in_bf16_says_why():
    model = nn.ModuleDict({"a": Other(), "b": Titan(dim=40), "c": Titan(), "d": Titan(dim=16), "e": Titan()})
    plan = octavo.plan(model, policy=octavo.Policy(keep=["c"]), device="h200")
    reasons = {row.name.partition(".")[0]: row.reason for row in plan.layers}
    assert "a" not in reasons and "is not recognised as experts" in plan.unconverted[0].reason
    assert "grouped FP8 GEMMs take multiples of 16" in reasons["b"]
    assert reasons["c"] == "kept by the policy" and reasons["d"] == "fewer than 32 features"
    assert [row.kernels for row in plan.layers if row.is_fp8] == [" / ".join(["grouped_gemm"] * 3)] * 2
    plan = octavo.plan(model, "tensorwise")
    assert plan.fp8_layers == 0 and "Grouped GEMMs have a scale per row" in plan.layers[-1].reason


@pytest.mark.parametrize("device", [None, "h200"])
def test_experts_rotate_their_inputs(device):
    rows = octavo.plan(nn.ModuleDict({"e": Titan(dim=256, hidden=64)}), "rotated", device=device).layers
    assert [row.recipe for row in rows] == ["rotated"] * 2 and rows[0].reason.startswith("fused")
    assert rows[1].reason.startswith("rotated by blocks of 64, the largest power of 4 that divides 64; fused")


def test_on_the_meta_device_and_converted_again():
    with torch.device("meta"):
        assert octavo.plan(nn.ModuleDict({"e": Titan()})).fp8_layers == 2
    model = nn.ModuleDict({"e": Titan()})
    octavo.convert(model)
    first = find_experts(model)
    plan = octavo.convert(model, {"modules": {"e.down_gemm": "bf16"}})
    assert find_experts(model) == first and [row.is_fp8 for row in plan.layers] == [True, False]
    model["e"](torch.randn(4, 32), torch.ones(4).long()).sum().backward()
    assert octavo.revert(model) == 2 and type(model["e"]) is Titan


@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_evidence_of_a_precision_map_is_in_the_plan(recipe):
    found = {"reason": "over the loss budget", "loss_change": 2e-4}
    given = {"modules": {"e.down_gemm": recipe}, "evidence": {"e.down_gemm": found}}
    first, second = octavo.plan(nn.ModuleDict({"e": Titan()}), given).layers
    assert second.is_fp8 == (recipe == "folded") and second.evidence.loss_change == 2e-4
    assert second.reason.startswith("over the loss budget") and (";" in second.reason) == second.is_fp8
    assert first.evidence is None and "budget" not in first.reason


class Configured(nn.Module):
    """Experts whose activation is a module, and whose bias may be added later."""

    def __init__(self, experts=4, dim=32, hidden=48):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, dim) / 6)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) / 7)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.0)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.up)):
            tokens, places = torch.where(ids == e)
            h = self.drop(self.act(x[tokens] @ self.up[e].T))
            y = y.index_add(0, tokens, (h @ self.down[e].T) * weights[tokens, places, None])
        return y


def test_what_changes_the_formula_later_is_computed_and_said(caplog):
    model = nn.ModuleDict({"e": Configured()})
    given = torch.randn(6, 32), torch.arange(6)[:, None] % 4, torch.ones(6, 1)
    assert octavo.convert(model).fp8_layers == 2
    with record() as ledger:
        model["e"](*given)
    assert sum(ledger.gemms.values()) == 2
    model["e"].act = nn.GELU()
    plain = Configured()
    plain.load_state_dict(model["e"].state_dict())
    plain.act = nn.GELU()
    assert torch.equal(model["e"](*given), plain(*given)) and "act has changed since" in caplog.text
    octavo.convert(model)
    assert model["e"].expert_roles.kind == "gelu" and 20 < sqnr_db(plain(*given), model["e"](*given)) < 60
    model["e"].drop.p = 0.5
    assert octavo.convert(model).fp8_layers == 0 and type(model["e"]) is Configured


def test_experts_of_several_ranks_that_have_changed_are_refused():
    model = nn.ModuleDict({"e": Configured()})
    octavo.convert(model)
    model["e"].exchange = lambda *_: None
    model["e"].act = nn.GELU()
    with pytest.raises(UnsupportedError, match="has changed since it was converted"):
        model["e"](torch.randn(6, 32), torch.zeros(6, 1).long(), torch.ones(6, 1))


def test_a_nan_is_named():
    model = nn.ModuleDict({"e": Titan()})
    with torch.no_grad():
        model["e"].w3[1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"e\.w3 holds 1 value"):
        octavo.convert(model)
    assert not isinstance(model["e"], Experts)


def test_products_can_be_switched_one_by_one():
    model = build(ModelConfig(architecture="moe", vocab=32, dim=32, layers=1, heads=2, sequence=8, experts=4), 0)
    tokens = torch.randint(32, (2, 8))
    with torch.no_grad(), switchable(model, "folded", None, 64, None) as switch:
        wide = model(tokens)
        names = [name for name in switch.layers if "experts" in name]
        assert names == [f"layers.0.feed_forward.experts.{name}_gemm" for name in ("gate_up", "down")]
        for name in names:
            with switch.using({name: ("fprop",)}):
                assert 20 < octavo.numerics.sqnr_db(wide, model(tokens)) < 80
        assert torch.equal(wide, model(tokens))


class EqualGroups(nn.Module):
    """Llama 4's: rows alone, as many for each expert."""

    def __init__(self, experts=4, dim=32, hidden=48, factor=1.0):
        super().__init__()
        self.num_experts, self.hidden_size, self.factor = experts, dim, factor
        self.gate_up_proj = nn.Parameter(torch.randn(experts, dim, 2 * hidden) / 6)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, dim) / 7)

    def forward(self, hidden_states):
        x = hidden_states.view(self.num_experts, -1, self.hidden_size)
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        return self.factor * torch.bmm(up * F.silu(gate), self.down_proj).view(-1, self.hidden_size)


def test_experts_that_are_given_as_many_rows_each():
    torch.manual_seed(0)
    model, x = nn.Sequential(EqualGroups()), torch.randn(24, 32)
    expected = model(x)
    plan = octavo.convert(model)
    assert plan.fp8_layers == 2 and plan.layers[0].reason == "fused: sort, gate, up, silu, down, sum"
    assert sqnr_db(expected, model(x)) > 22
    with octavo.disabled(model):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="invalid for input"):
        model(torch.randn(23, 32))
    assert octavo.revert(model) == 2 and torch.equal(model(x), expected)
    assert not find_experts(nn.Sequential(EqualGroups(factor=1.01)))


def test_128_experts_with_biases_and_a_gate_of_their_own():
    """gpt-oss-120b: in a row of a weight's gradient, sums may cancel."""
    gpt_oss = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(**{**SIZES, "num_local_experts": 128, "head_dim": 16})
    assert list(find_experts(nn.Sequential(gpt_oss.GptOssExperts(config)))) == ["0"]
