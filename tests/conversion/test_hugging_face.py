"""Models of Hugging Face: recognised as they are written, trained, compiled, and given back unchanged."""

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo import kernels
from octavo.conversion import Policy, convert, disabled, revert
from octavo.conversion.fusion_patterns import FusionPattern
from octavo.nn import Linear, norm, rotary_attention
from octavo.nn.fused import FusedMLP
from octavo.nn.norm import Norm
from octavo.numerics import sqnr_db

LAYERS = 2
CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, CONFIG),
    "mistral": (MistralConfig, MistralForCausalLM, CONFIG),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, CONFIG),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**CONFIG, "tie_word_embeddings": True}),
}
OTHERS = ("mistral", "qwen2", "qwen3")
IDS = torch.arange(2 * 24).reshape(2, 24) * 7 % 95 + 1  # no padding


@pytest.fixture(params=["llama", pytest.param("mistral", marks=pytest.mark.slow), "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    """A Mistral is recognised below; recognised, it is a Llama."""
    name: str = request.param
    return name


def made(family: str) -> nn.Module:
    config, cls, settings = MODELS[family]
    torch.manual_seed(0)
    model = cls(config(**settings))
    with torch.no_grad():  # they start at 0 and 1, which would hide them
        for name, p in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.fixture
def model(family: str) -> nn.Module:
    return made(family)


@functools.cache
def converted_once(family: str) -> nn.Module:
    model = made(family)
    convert(model)
    return model


@pytest.fixture
def converted(family: str) -> nn.Module:
    """A copy of a model that was converted by default: most of a test's time would be the recognition."""
    return copy.deepcopy(converted_once(family))


llama_alone = pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)])
"""What a block of another family adds is tested elsewhere: its recognition and its bits."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def loss_of(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that is attached to the modules of a model, and of what class they are."""
    return {name: (type(m), {**vars(m)}) for name, m in model.named_modules()}


@pytest.mark.parametrize("family", MODELS)
def test_each_layer_is_recognised(model, family):
    plan = convert(model)
    for i in range(LAYERS):
        mine = [s for s in plan.structures if s.name.startswith(f"model.layers.{i}.")]
        attention, mlp, *norms = mine
        assert attention == FusionPattern(
            name=f"model.layers.{i}.self_attn", kind="shared", layers=("q_proj", "k_proj", "v_proj")
        )
        assert mlp == FusionPattern(
            name=f"model.layers.{i}.mlp", kind="mlp", layers=("gate_proj", "up_proj", "down_proj"), activation="silu"
        )
        assert [(s.name.rpartition(".")[2], s.kind) for s in norms] == [
            ("input_layernorm", "norm"),
            ("post_attention_layernorm", "norm"),
        ]
        layer = model.model.layers[i]
        assert isinstance(layer.mlp, FusedMLP) and isinstance(layer.input_layernorm, Norm)
        assert layer.self_attn.q_proj.shared is layer.self_attn.v_proj.shared is not None
        assert (layer.self_attn.q_proj.bias is not None) == (family == "qwen2")
    assert plan.fp8_layers == 7 * LAYERS
    assert type(model.lm_head) is nn.Linear  # by the policy
    assert [m for m in model.modules() if type(m) is Linear and m.shared is None] == [
        getattr(layer, name)
        for layer in model.model.layers
        for layer, name in (
            (layer.self_attn, "o_proj"),
            (layer.mlp, "gate_proj"),
            (layer.mlp, "up_proj"),
            (layer.mlp, "down_proj"),
        )
    ]


def test_names_and_parameters_stay_and_all_comes_back(model):
    before, expected = state(model), loss_of(model)
    parameters = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    names = list(model.state_dict())
    convert(model)
    gradients(model)
    assert list(model.state_dict()) == names
    assert {name: id(p) for name, p in model.named_parameters()} == {name: i for name, (i, _) in parameters.items()}
    assert revert(model) == 7 * LAYERS
    assert state(model) == before
    assert all(torch.equal(p, parameters[name][1]) for name, p in model.named_parameters())
    assert torch.equal(loss_of(model), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_all_fusions_of_a_block_are_found_and_compute_what_it_did(model, family, recipe, monkeypatch):
    monkeypatch.setattr(rotary_attention, "gains_by_kernels", lambda device: True)
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: True)
    calls = []
    rotate = rotary_attention.rotate
    monkeypatch.setattr(rotary_attention, "rotate", lambda *given: (calls.append(given), rotate(*given))[1])
    before = state(model)
    convert(model, recipe)
    expected = gradients(model)
    plan = convert(model, recipe, policy=Policy(fuse="all"))
    assert not calls
    got = gradients(model)
    assert len(calls) == 2 * LAYERS
    if recipe == "bf16":  # these weights are FP32: all that differs is the order of sums
        assert all(sqnr_db(expected[name].double(), got[name].double()) > 90 for name in expected)
    mine = [(s.name.rpartition("layers.0.")[2], s.kind) for s in plan.structures if "layers.0." in s.name]
    attention = [("self_attn", "rotary")]
    norms = [("input_layernorm", "norm"), ("post_attention_layernorm", "norm")]
    assert {*attention, *norms} <= {*mine}
    assert (("self_attn.q_norm", "norm") in mine) == (("self_attn.k_norm", "norm") in mine) == (family == "qwen3")
    assert f"model.layers.*.self_attn ({LAYERS}): fused: rotary embedding of q and k (apply_rotary_pos_emb)" in str(
        plan
    )
    out = model.generate(IDS, max_new_tokens=3, do_sample=False)
    with disabled(model):
        calls.clear()
        assert out.shape == model.generate(IDS, max_new_tokens=3, do_sample=False).shape and not calls
    revert(model)
    assert state(model) == before


def test_norms_of_weights_in_bf16_are_fused_under_autocast(model, family, monkeypatch):
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: True)
    normalise, rows = norm.norm.normalise, []
    monkeypatch.setattr(norm.norm, "normalise", lambda x, *a, **k: (rows.append(x.shape), normalise(x, *a, **k))[1])
    plain = copy.deepcopy(model.bfloat16())
    convert(model, "bf16", policy=Policy(fuse="all"))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
        torch.testing.assert_close(loss, loss_of(plain), rtol=1e-2, atol=0)
    assert len(rows) == LAYERS * (4 if family == "qwen3" else 2) + 1
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_loss_and_gradients_are_near_the_originals(model):
    expected_loss, expected = loss_of(model).detach(), gradients(model)
    convert(model)
    with kernels.record() as ledger:
        got = gradients(model)
    # A layer: fprop 7, dgrad and wgrad of q, k and v together, of o, of gate and up together, of down.
    assert sum(ledger.gemms.values()) == LAYERS * (7 + 4 + 4) and ledger.weights == 7 * LAYERS
    assert abs(float(loss_of(model).detach() - expected_loss)) < 2e-3 * float(expected_loss)
    for name, gradient in got.items():  # of a vector, 16 to 128 figures say how near: by chance now and then less
        assert sqnr_db(expected[name], gradient) > (15 if gradient.dim() == 2 else 12), name


def test_a_padding_token_whose_embedding_is_zero_ruins_no_gradient(model, monkeypatch):
    monkeypatch.setitem(globals(), "IDS", IDS.clone().index_fill_(1, torch.tensor([0]), 0))
    assert not model.model.embed_tokens(IDS)[:, 0].any()
    expected = gradients(model)
    convert(model)
    got = gradients(model)
    for name in (name for name in got if got[name].dim() == 2):
        assert sqnr_db(expected[name], got[name]) > 12, name


def test_disabled_it_is_the_original(model):
    expected = loss_of(model), gradients(model)
    convert(model)
    with disabled(model):
        assert torch.equal(loss_of(model), expected[0]) and same(gradients(model), expected[1])


@llama_alone
def test_it_trains(converted):
    model = converted
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_in_bf16(model):
    model.bfloat16()
    convert(model)
    assert all(g.dtype == torch.bfloat16 and bool(g.isfinite().all()) for g in gradients(model).values())


@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "llama", "qwen3"])
def test_its_layers_compile_whole_and_are_one_graph(converted):
    model = converted
    expected = gradients(model)
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    got = gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # not one a layer
    for name, gradient in got.items():  # the norm's FP32 sums are the compiler's, and flip a code here and there
        assert sqnr_db(expected[name], gradient) > 25, name


@pytest.mark.covering(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(converted, reentrant):
    model = converted
    expected = gradients(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert same(gradients(model), expected)


def test_generating(model):
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.eval().generate(IDS[:, :6], **settings)
    convert(model)
    got = model.generate(IDS[:, :6], **settings)
    assert got.shape == (2, 11) and torch.equal(got[:, :6], IDS[:, :6])
    with disabled(model):
        assert torch.equal(model.generate(IDS[:, :6], **settings), expected)


def test_saving_and_loading(converted, family, tmp_path):
    model = converted
    model.save_pretrained(tmp_path)
    plain = MODELS[family][1].from_pretrained(tmp_path)
    assert not any(isinstance(m, Linear | Norm | FusedMLP) for m in plain.modules())
    revert(model)
    assert torch.equal(loss_of(plain), loss_of(model))


def test_a_copy(model):
    convert(model)
    twin = copy.deepcopy(model)  # as `converted` is one
    expected = gradients(model)
    del model
    gc.collect()
    assert same(gradients(twin), expected)
    assert isinstance(twin.model.layers[0].mlp, FusedMLP)


def test_inputs_of_activations_in_fp8(model: nn.Module, converted: nn.Module):
    other = converted
    convert(model, policy=Policy(activation_inputs="fp8"))
    assert torch.equal(loss_of(model), loss_of(other))
    got, expected = gradients(model), gradients(other)
    assert min(sqnr_db(expected[name], got[name]) for name in got) > 20
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert same(gradients(model), got)
