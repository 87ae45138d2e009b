"""Weights of Hugging Face: every kind of model computes the logits that transformers computes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, ConfigError
from octavo.lab.models import ModelConfig, build
from octavo.lab.models.hugging_face import read_settings, stored_config
from octavo.lab.models.pretrained import _files

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3.1": ("Llama", {"rope_parameters": STRETCHED}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 48}),
    "qwen 2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {"head_dim": 16}),
}


def saved(kind: str, directory: Path, shard: str = "20KB", **changes: Any) -> Any:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | own | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each) * (0.3 if each.dim() > 1 else 1))  # biases and norms that matter
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    config = ModelConfig(**read_settings(tmp_path))
    own = build(config, 0, tmp_path)
    assert config.sequence == (48 if kind == "mistral" else 64)
    tokens = torch.randint(48, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.json").write_text(json.dumps(stored_config(config)))
    assert ModelConfig(**read_settings(again)) == replace(config, head_size=config.head_dim)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "biases"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "'yarn'"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    with pytest.raises(ConfigError, match=said):
        read_settings(tmp_path)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = ModelConfig(**read_settings(tmp_path))
    for changed, said in (({"dim": 64}, "shape"), ({"layers": 3}, "only the model"), ({"layers": 1}, "only the dir")):
        with pytest.raises(CheckpointError, match=said):
            build(ModelConfig(**{**read_settings(tmp_path), **changed}), 0, tmp_path)
    part = next(tmp_path.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        build(config, 0, tmp_path)
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        build(config, 0, tmp_path / "none")
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is a run\. Export"):
        read_settings(tmp_path / "none")


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_files_beside_those_of_the_model_are_not_read(shard: str, tmp_path: Path) -> None:
    """Repositories of Mistral have the weights a second time, by other names."""
    saved("mistral", tmp_path, shard=shard)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00009-of-00009.safetensors"}}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)


@pytest.mark.parametrize("scale", ["row", "tensor", "block"])
def test_codes_are_multiplied_by_their_scales(scale: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)
    name, key = "model.layers.0.mlp.up_proj", "weight_scale_inv" if scale == "block" else "weight_scale"
    weight = model.get_parameter("layers.0.feed_forward.w3.weight").detach()
    blocks = weight.reshape(2, 32, 2, 16)
    amax = {
        "row": weight.abs().amax(1, True),
        "tensor": weight.abs().amax().view(1),
        "block": blocks.abs().amax((1, 3)),
    }
    scales = amax[scale] / 448
    each = scales.repeat_interleave(32, 0).repeat_interleave(16, 1) if scale == "block" else scales
    codes = (weight / each).to(torch.float8_e4m3fn)
    file = next(f for f in tmp_path.glob("*.safetensors") if f"{name}.weight" in load_file(f))
    save_file({**load_file(file), f"{name}.weight": codes, f"{name}.{key}": scales.clone()}, file)
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": {"weight_block_size": [32, 16]}}))
    read = build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)
    assert torch.equal(read.get_parameter("layers.0.feed_forward.w3.weight"), codes.float() * each)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8])
def test_other_codes_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("llama", tmp_path, shard="1GB")
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype), f"{name}_scale": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=rf"'{name}' is stored as {dtype}.*float8_e4m3fn"):
        build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)


@pytest.mark.parametrize("shape", [(64,), (2, 2), (64, 2), (1, 32)])
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of compressed-tensors' strategy `group`, or of blocks that config.json does not name."""
    saved("llama", tmp_path, shard="1GB")
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    codes = tensors[name].to(torch.float8_e4m3fn)
    save_file({**tensors, name: codes, f"{name}_scale": torch.ones(shape)}, file)
    with pytest.raises(CheckpointError, match=rf"'{name}_scale' has the shape .*\(64, 1\).* \(1, 1\)"):
        build(ModelConfig(**read_settings(tmp_path)), 0, tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "below/../../outside.safetensors", 5, None])
def test_a_weight_map_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"index\.json: (.*leads out of the checkpoint|has no weight_map)"):
        _files(tmp_path / "model")


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_pipe_in_place_of_weights_is_refused_at_once(tmp_path: Path, is_indexed: bool) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    if is_indexed:
        homes = {"weight_map": {"lm_head.weight": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(homes))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(a pipe, socket or device"):
        _files(tmp_path)
