"""Llamas, Mistrals and Qwens as Hugging Face stores them: config.json and names of tensors. Without torch.

Both rotate channel i with i + E/2, so that no row of a weight moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._util.config_reader import blaming, read_file
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.models.config import ROPE_SCALING, ModelConfig

TYPES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""`model_type` of the models that are read, and the beginning of their class names."""
_MODULES = {
    r"tok_embeddings": "model.embed_tokens",
    r"norm": "model.norm",
    r"lm_head": "lm_head",
    r"layers\.(\d+)\.attention_norm": r"model.layers.\1.input_layernorm",
    r"layers\.(\d+)\.ffn_norm": r"model.layers.\1.post_attention_layernorm",
    r"layers\.(\d+)\.attention\.w([qkvo])": r"model.layers.\1.self_attn.\2_proj",
    r"layers\.(\d+)\.attention\.([qk])_norm": r"model.layers.\1.self_attn.\2_norm",
    r"layers\.(\d+)\.feed_forward\.w1": r"model.layers.\1.mlp.gate_proj",
    r"layers\.(\d+)\.feed_forward\.w3": r"model.layers.\1.mlp.up_proj",
    r"layers\.(\d+)\.feed_forward\.w2": r"model.layers.\1.mlp.down_proj",
}
"""Module names of a Llama, and those in Hugging Face's."""


def stored_name(module: str) -> str:
    """Return Hugging Face's name of a module of a `octavo.lab.models.Llama`.

    Raises:
        UnsupportedError: there is none.
    """
    for pattern, stored in _MODULES.items():
        if re.fullmatch(pattern, module):
            return re.sub(pattern, stored, module)
    raise UnsupportedError(f"Hugging Face's Llama has no module '{module}'.")


def of_hub(path: Path) -> str:
    """Return what to do if a path that does not exist may be the name of a model of the hub; empty if it is not."""
    if not re.fullmatch(r"[\w-]+/[\w.-]+", str(path)) or path.suffix in (".json", ".toml", ".py", ".safetensors"):
        return ""
    return (
        " If it is a model of Hugging Face's hub, download its config.json, and to train it all of it:"
        f" `hf download {path} config.json --local-dir {path.name}`. Then name {path.name}."
    )


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the model in a directory.

    Raises:
        ConfigError: there is no config.json, it is malformed, or of a model that differs from a Llama, which it names.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory.{of_hub(directory)}")
    if (directory / "checkpoints").exists():
        raise ConfigError(f"{directory}: is a run. Export it first: octavo export {directory} --format plain")
    if not path.is_file():
        raise ConfigError(f"{directory}: contains no config.json of Hugging Face.")
    known = read_file(path)
    with blaming(path):
        if reason := _unsupported_reason(known):
            raise ConfigError(f"{path}: {reason}. Models that are read: {', '.join(TYPES.values())}.")
        rope = {**known, **(known.get("rope_scaling") or {}), **(known.get("rope_parameters") or {})}
        return {
            "architecture": "llama",
            "vocab": known["vocab_size"],
            "dim": known["hidden_size"],
            "layers": known["num_hidden_layers"],
            "heads": known["num_attention_heads"],
            "kv_heads": known.get("num_key_value_heads") or known["num_attention_heads"],
            "head_size": known.get("head_dim"),
            "ffn": known["intermediate_size"],
            "sequence": min(known["max_position_embeddings"], _window(known) or known["max_position_embeddings"]),
            "norm_eps": known.get("rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "rope_scaling": {name: rope[name] for name in ROPE_SCALING} if _rope_type(known) == "llama3" else {},
            "tie_embeddings": bool(known.get("tie_word_embeddings")),
            "qkv_bias": known["model_type"] == "qwen2",
            "qk_norm": known["model_type"] == "qwen3",
        }


def stored_config(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of a Llama without its quantisation; the inverse of `read_settings`.

    Raises:
        UnsupportedError: Hugging Face has no such model.
    """
    if config.qkv_bias and config.qk_norm:
        raise UnsupportedError("no engine has a model with both model.qkv_bias and model.qk_norm.")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    rope = {"rope_type": "llama3", **config.rope_scaling} if config.rope_scaling else {"rope_type": "default"}
    return {
        "architectures": [f"{TYPES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # for transformers before 5; later versions read `rope_parameters`
        **({"rope_scaling": rope} if config.rope_scaling else {}),
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _unsupported_reason(known: Mapping[str, Any]) -> str | None:
    """Return why a model cannot be computed as a Llama, or None."""
    kind = known.get("model_type")
    if kind not in TYPES:
        return f"model_type is {kind!r}"
    if known.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {known['hidden_act']!r}, not 'silu'"
    if known.get("mlp_bias") or (known.get("attention_bias") and kind != "qwen2"):
        return "the model has biases in output or feed-forward layers"
    if known.get("partial_rotary_factor", 1) != 1 or _rope_type(known) not in ("default", "llama3"):
        return f"its rotary positions are {_rope_type(known)!r}, not 'default' or 'llama3'"
    return None


def _rope_type(known: Mapping[str, Any]) -> str:
    rope = known.get("rope_parameters") or known.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _window(known: Mapping[str, Any]) -> int | None:
    """Return the width of attention if it is limited: shorter sequences do not meet the limit."""
    return known.get("sliding_window") if known.get("use_sliding_window", True) else None
