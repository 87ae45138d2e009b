"""Models as engines know them: the names of their tensors, and config.json.

A Llama of `octavo.models` becomes a `LlamaForCausalLM`: both rotate channel i with i + E/2, so that no row moves.
Models of Hugging Face keep their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.errors import UnsupportedError
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.models.moe import MoE

_LLAMA = {
    r"tok_embeddings": "model.embed_tokens",
    r"norm": "model.norm",
    r"lm_head": "lm_head",
    r"layers\.(\d+)\.attention_norm": r"model.layers.\1.input_layernorm",
    r"layers\.(\d+)\.ffn_norm": r"model.layers.\1.post_attention_layernorm",
    r"layers\.(\d+)\.attention\.w([qkvo])": r"model.layers.\1.self_attn.\2_proj",
    r"layers\.(\d+)\.feed_forward\.w1": r"model.layers.\1.mlp.gate_proj",
    r"layers\.(\d+)\.feed_forward\.w3": r"model.layers.\1.mlp.up_proj",
    r"layers\.(\d+)\.feed_forward\.w2": r"model.layers.\1.mlp.down_proj",
}
"""Module names of a Llama, and those in Hugging Face's."""


class EngineModel(NamedTuple):
    """A model under its exported names."""

    rename: Callable[[str], str]
    """Maps the full name of a module to its exported name."""
    config: dict[str, Any]
    """config.json, without its quantisation."""
    head: str
    """Full name of the head in the model; empty without one. Engines always compute it in high precision."""
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of the layers of an expert, of which engines expect one tensor each."""
    rename_with_experts: Callable[[str], str] | None = None
    """`rename` where experts are stored so; None: the same."""


def engine_model(model: nn.Module, dtype: torch.dtype) -> EngineModel:
    """Return the exported form of a model.

    Args:
        dtype: dtype of its values in high precision.

    Raises:
        UnsupportedError: no engine supports such a model.
    """
    name = str(dtype).removeprefix("torch.")
    if isinstance(model, Llama) and not isinstance(model, MoE):
        return EngineModel(_llama_name, {**_llama_config(model.config), "dtype": name, "torch_dtype": name}, "lm_head")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise UnsupportedError(
            f"export: no engine supports a {type(model).__name__}. A Llama of octavo.models and models of Hugging "
            "Face's transformers can be exported."
        )
    known = json.loads(config.to_json_string())
    known.pop("quantization_config", None)  # from the checkpoint it was loaded from
    last = getattr(model, "get_output_embeddings", lambda: None)()
    head = next((name for name, module in model.named_modules() if module is last), "")
    settings = {**known, "architectures": [type(model).__name__], "dtype": name}
    if known.get("model_type") == "mixtral":
        return EngineModel(str, settings, head, ("w1", "w3", "w2"), _mixtral_name)
    return EngineModel(str, settings, head)


def _mixtral_name(module: str) -> str:
    return module.replace(".mlp", ".block_sparse_moe")


def _llama_name(module: str) -> str:
    for pattern, exported in _LLAMA.items():
        if re.fullmatch(pattern, module):
            return re.sub(pattern, exported, module)
    raise UnsupportedError(f"export: Hugging Face's Llama has no module '{module}'.")


def _llama_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "rope_theta": config.rope_theta,  # for transformers before 5; later versions read the next one
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
