"""Hugging Face's transformers, which knows nothing of Octavo, loads what was written and computes the same."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.errors import UnsupportedError
from octavo.numerics import BLOCK_128x128
from octavo.numerics.rotation import hadamard
from octavo.serving import export, rotate_inputs

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

ROWWISE = {"base": "rowwise", "name": "served", "fprop": {"input": {"scaling": "float32"}}}
"""Inputs with scales as engines make them, not rounded to powers of two."""
BLOCKS = {"base": "block", "name": "served", "fprop": {"input": {"scaling": "float32"}}}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", [{}, {"kv_heads": 2}, {"tie_embeddings": True, "rope_theta": 5e5, "norm_eps": 1e-3}])
def test_plain_weights_make_the_same_model(make_llama, tmp_path, shape):
    model, tokens = make_llama("bf16", **shape), torch.randint(256, (2, 48))
    for parameter in model.parameters():  # norms of 1 would hide a norm in the wrong place
        parameter.data *= 1 + torch.rand_like(parameter)
    export(model, tmp_path / "out", "plain", dtype=torch.float32)
    with torch.no_grad():
        assert error(load(tmp_path / "out")(tokens).logits, model(tokens)) < 1e-5


@pytest.mark.parametrize(("recipe", "least"), [(ROWWISE, 1e-4), (BLOCKS, 0.2), ("tensorwise", 1e-4)])
def test_it_computes_what_was_trained(make_llama, tmp_path, recipe, least):
    """A share of what FP8 changes at all. With blocks it multiplies by 1 / scale where Octavo divides."""
    model, tokens = make_llama(recipe), torch.randint(256, (2, 48))
    export(model, tmp_path / "out", dtype=torch.float32)
    served, trained, high = logits_of(load(tmp_path / "out"), model, tokens)
    assert error(served, trained) < least * error(high, trained)


def of_library(stem, **more):
    """Return a small causal language model of transformers and its tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | more
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{stem}Config")(**sizes)
    return getattr(transformers, f"{stem}ForCausalLM")(config).eval(), torch.randint(3, 90, (2, 16))


class Token(torch.nn.Module):
    """A layer that sees its input as (1, T, D), of which compressed-tensors scales each token."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.weight = layer, layer.weight

    def forward(self, x):
        return self.layer(x.reshape(1, -1, x.shape[-1])).view(*x.shape[:-1], -1)


LATENT = {
    "intermediate_size": 128, "n_routed_experts": 4, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stem", "more", "scales_several_tokens"),
    [
        ("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64}, True),  # its fc1 and fc2 read (B T, D)
        ("DeepseekV3", LATENT, True),  # its kv_b_proj reads (B, 1, T, D)
        ("Olmo2", {"intermediate_size": 128}, False),
    ],
)
def test_what_deviates_from_training_is_one_scale_for_many_tokens(stem, more, scales_several_tokens, tmp_path):
    """compressed-tensors, as transformers runs it, takes the first two dimensions of an input for its tokens."""
    model, tokens = of_library(stem, **more)
    octavo.convert(model, ROWWISE, policy=octavo.Policy(min_gain=0))
    export(model, tmp_path / "out", dtype=torch.float32)
    served, trained, high = logits_of(load(tmp_path / "out"), model, tokens)
    assert (error(served, trained) > 0.1 * error(high, trained)) is scales_several_tokens
    engine = load(tmp_path / "out")
    for name, layer in [*engine.named_modules()]:
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            engine.set_submodule(name, Token(layer))
    assert error(logits_of(engine, model, tokens)[0], trained) < 1e-4 * error(high, trained)


def test_rotated_integers_are_what_was_trained(make_llama, tmp_path):
    """Weights are equal, inputs rounded alike but for their scale: amax / 127.5 where Octavo has amax / 127."""
    model, tokens = make_llama("rotated"), torch.randint(256, (2, 48))
    export(model, tmp_path / "out", dtype=torch.float32)
    loaded = load(tmp_path / "out")
    unrotated = loaded(tokens).logits
    theirs = rotate_inputs(load(tmp_path / "out"), tmp_path / "out")
    served, trained, high = logits_of(theirs, model, tokens)
    assert error(served, trained) < error(high, trained) < 0.02 < error(unrotated, trained)
    with torch.no_grad():
        x, layer, weight = torch.randn(1, 9, 256), model.layers[1].feed_forward.w2, theirs.model.layers[1].mlp.down_proj
        rows = x.double() @ hadamard(256)
        scale = rows.abs().amax(-1, keepdim=True) / 127.5
        codes = octavo.quantize(layer.weight, "int8", "row", "float32", rotation=256)
        exact = (rows / scale).round().clamp(-128, 127) * scale @ octavo.dequantize(codes).double().t()
        assert error(weight(x), exact) < 1e-3 < error(rows @ octavo.dequantize(codes).double().t(), exact)


def test_rotated_integers_beside_fp8(make_llama, tmp_path):
    modules = {"layers.0.*": {"base": "folded"}}
    model, tokens = make_llama({"base": "rotated", "modules": modules}), torch.randint(256, (2, 48))
    export(model, tmp_path / "out", dtype=torch.float32)
    served, trained, high = logits_of(rotate_inputs(load(tmp_path / "out"), tmp_path / "out"), model, tokens)
    assert error(served, trained) < error(high, trained)


def test_what_is_not_rotated_stays_and_a_missing_matrix_is_named(make_llama, tmp_path):
    export(make_llama(), tmp_path / "fp8")
    model = load(tmp_path / "fp8")
    assert rotate_inputs(model, tmp_path / "fp8") is model
    export(make_llama("rotated"), tmp_path / "int8")
    loaded = load(tmp_path / "int8")
    (tmp_path / "int8/model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=r"int8: has no 'model\.layers\.0\.mlp\.down_proj\.rotation_256_input"):
        rotate_inputs(loaded, tmp_path / "int8")


def test_blocks_of_fp8_are_the_values_of_their_codes(make_llama, tmp_path):
    model = make_llama("block")
    export(model, tmp_path / "out", "fp8", dtype=torch.float32)
    theirs = load(tmp_path / "out")  # without a GPU it decodes them
    weight = octavo.quantize(model.layers[1].feed_forward.w2.weight.detach(), granularity=BLOCK_128x128)
    assert torch.equal(theirs.model.layers[1].mlp.down_proj.weight, octavo.dequantize(weight, torch.float32))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_of_theirs_comes_back(tmp_path, kind):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 272, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
    model, tokens = transformers.AutoModelForCausalLM.from_config(config).float(), torch.randint(256, (2, 48))
    octavo.convert(model, ROWWISE)
    exported = export(model, tmp_path / "out", dtype=torch.float32)
    assert len(exported.fp8_layers) == 14 and list(exported.other_layers) == ["lm_head"]
    served, trained, high = logits_of(load(tmp_path / "out"), model, tokens)
    assert error(served, trained) < 0.01 * error(high, trained)


def test_experts_that_lie_in_one_tensor_are_noted(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 272}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=2)
    model, tokens = transformers.AutoModelForCausalLM.from_config(config).float(), torch.randint(256, (2, 16))
    octavo.convert(model, ROWWISE, policy=octavo.Policy(keep=["*.experts"]))
    (note, _) = export(model, tmp_path / "out", dtype=torch.float32).notes  # the other: no tokenizer
    assert "model.layers.0.mlp.experts.gate_up_proj contains all experts" in note
    served, trained, high = logits_of(load(tmp_path / "out"), model, tokens)
    assert error(served, trained) < 0.01 * error(high, trained)


def logits_of(theirs, ours, tokens):
    """Return theirs, ours in FP8, and ours in high precision."""
    with torch.no_grad():
        found = [model(tokens) for model in (theirs, ours)]
        with octavo.disabled(ours):
            found.append(ours(tokens))
    return [getattr(y, "logits", y) for y in found]
