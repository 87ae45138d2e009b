"""The plan shows what it does not convert, and counts it."""

import pytest
import torch
from torch import nn

import octavo
from octavo.conversion import Policy, make_plan
from octavo.conversion.planner import FAST_PATH
from octavo.conversion.unconverted import IN_ONE_CALL
from octavo.kernels import record


class OwnForward(nn.MultiheadAttention):
    def forward(self, x, *others, **options):
        return super().forward(x, x, x, **options)


def with_own_forward():
    layer = nn.TransformerEncoderLayer(64, 4, 128)
    layer.self_attn = OwnForward(64, 4)
    return layer


def test_attention_of_pytorch_with_a_forward_of_its_own():
    plan = make_plan(with_own_forward())
    (weight,) = plan.unconverted
    assert (weight.name, weight.shape) == ("self_attn.in_proj_weight", (192, 64))
    assert weight.reason.startswith("OwnForward, a subclass of nn.MultiheadAttention, has a forward of its own")
    row = next(layer for layer in plan.layers if layer.name == "self_attn.out_proj")
    assert not row.is_fp8 and row.reason.startswith("nn.MultiheadAttention reads its weight and never calls it")
    total = 2 * 128 * 64
    assert plan.share == total / (total + 192 * 64 + 64 * 64)
    text = str(plan)
    assert "self_attn.in_proj_weight  192 x 64  -        not converted" in text
    assert f"{plan.share:.0%} of the FLOPs of GEMMs with weights" in text
    assert '"unconverted": [' in plan.to_json()


def test_attention_of_pytorch_has_two_rows_and_one_switch():
    """`out_proj` is called by the attention that computes its in-projection in FP8, and by no other."""
    model = nn.TransformerEncoderLayer(64, 4, 128)
    plan = make_plan(model)
    assert [(row.name, row.kind, row.is_fp8) for row in plan.layers[:2]] == [
        ("self_attn.in_proj", "q, k, v", True), ("self_attn.out_proj", "linear", True),
    ]  # fmt: skip
    assert plan.share == 1 and not plan.unconverted and "192 x 64, q, k, v" in str(plan)
    for kept in (
        make_plan(model, policy=Policy(keep={"self_attn": "mine"})),
        make_plan(model, policy=Policy(min_features=65)),
        make_plan(model, policy=Policy(filter=lambda name, module: not isinstance(module, nn.MultiheadAttention))),
        make_plan(model, {"name": "mixed", "base": "folded", "modules": {"*.in_proj": "bf16"}}),
        make_plan(model, "delayed"),
    ):
        rows = {row.name: row for row in kept.layers}
        assert not rows["self_attn.in_proj"].is_fp8 and not rows["self_attn.out_proj"].is_fp8
        assert not kept.unconverted
    assert rows["self_attn.in_proj"].reason.startswith("recipe 'delayed' stores scales")
    assert rows["self_attn.out_proj"].reason.endswith("never calls it: its in_proj stays in BF16")
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    assert FAST_PATH in make_plan(encoder, policy=Policy(keep=["linear*"])).notes
    assert FAST_PATH not in make_plan(encoder, policy=Policy(keep=["linear*", "self_attn"])).notes
    out = make_plan(model, policy=Policy(keep=["*.out_proj"]))
    assert [row.is_fp8 for row in out.layers[:2]] == [True, False]


def test_what_the_plan_says_of_attention_of_pytorch_is_true():
    """It is one call for `octavo.autocast` too; projections that are layers run in FP8."""
    plan = make_plan(attention := OwnForward(64, 4, batch_first=True))
    reasons = [plan.unconverted[0].reason, *(row.reason for row in plan.layers)]
    assert len(reasons) == 2 and all(reason.endswith(IN_ONE_CALL) for reason in reasons)
    assert "neither a layer nor octavo.autocast is inside it" in IN_ONE_CALL
    x = torch.randn(2, 8, 64)
    with record() as ledger, octavo.autocast("folded"):
        attention(x, x, x, need_weights=False)[0].sum().backward()
    assert not ledger.gemms


def test_little_in_fp8_is_said_and_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr("octavo.conversion.apply.warn_once", said.append)
    model = nn.ModuleDict({"lstm": nn.LSTM(64, 64), "out": nn.Linear(64, 64)})
    plan = octavo.convert(model)
    assert plan.share == 1 / 9 and len(plan.unconverted) == 2
    note = next(note for note in plan.notes if note.startswith("Little will run in FP8: 11% of the FLOPs"))
    assert "lstm.weight_ih_l0: LSTM multiplies by it itself, step by step" in note
    assert said == [f"octavo.convert: {note}"]
    said.clear()
    octavo.convert(nn.Sequential(nn.Linear(64, 64)))
    assert said == []


class Packed(nn.Module):
    """A layer of a library that has quantised its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(64, 64, dtype=torch.int32))


class Experts(nn.Module):
    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(8, 64, 64))


@pytest.mark.parametrize(
    ("module", "reason", "active"),
    [
        (Packed(), "Packed holds quantised weights already", 1.0),
        (Experts(), "Experts multiplies by its matrices itself", 0.25),
        (nn.Bilinear(64, 64, 64), "Bilinear multiplies by its matrices itself", 1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_has_its_reason(module, reason, active):
    policy = Policy(min_features=1)
    (weight,) = make_plan(nn.ModuleDict({"inner": module}), policy=policy).unconverted
    assert weight.reason.startswith(reason) and weight.active == active


def test_tables_small_parameters_and_layers_are_no_rows():
    model = nn.ModuleDict({"table": nn.Embedding(96, 64), "norm": nn.LayerNorm(64), "layer": nn.Linear(64, 64)})
    model.position_embedding = nn.Parameter(torch.zeros(1, 48, 64))
    model.token = nn.Parameter(torch.zeros(1, 1, 64))
    plan = make_plan(model)
    assert plan.unconverted == () and plan.share == 1.0
    assert plan.parameters == 96 * 64 + 2 * 64 + 65 * 64 + 48 * 64 + 64


def test_what_a_parametrization_computes_a_weight_from():
    """Weight norm stores a direction (64, 32) and a magnitude; the layer's own row says that its weight is computed."""
    plan = make_plan(nn.ModuleDict({"normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 64))}))
    assert [row.reason for row in plan.layers] == ["its weight is computed, by a parametrization for example"]
    (weight,) = plan.unconverted
    assert weight.name == "normed.parametrizations.weight.original1"
    assert weight.reason == "a weight is computed from it, by a parametrization"
