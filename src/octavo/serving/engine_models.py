"""Models as engines know them: the names of their tensors, and config.json.

A model may say so by itself: its method `stored_form` returns the exported name of a module and config.json, or None. A
Llama of `octavo.lab.models` is a `LlamaForCausalLM`, or a Qwen's with its options. Hugging Face's keep their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.errors import UnsupportedError
from octavo.nn.modules import WRAPPERS, unwrapped_name


class EngineModel(NamedTuple):
    """A model under its exported names."""

    rename: Callable[[str], str]
    """Maps the full name of a module to its exported name."""
    config: dict[str, Any]
    """config.json, without its quantisation."""
    head: str
    """Full name of the head in the model, without wrappers; empty without one. Engines always compute it in high
    precision."""
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of the layers of an expert, of which engines expect one tensor each."""
    rename_with_experts: Callable[[str], str] | None = None
    """`rename` where experts are stored so; None: the same."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of `torch.compile` and other wrappers, which have its attributes but not its names."""
    inner = next((module for name, module in model.named_children() if name in WRAPPERS), None)
    return model if inner is None else unwrapped(inner)


def engine_model(model: nn.Module, dtype: torch.dtype) -> EngineModel:
    """Return the exported form of a model.

    Args:
        model: without wrappers around it; its blocks may have some.
        dtype: dtype of its values in high precision.

    Raises:
        UnsupportedError: no engine supports such a model.
    """
    name = str(dtype).removeprefix("torch.")
    if (stored := getattr(model, "stored_form", lambda: None)()) is not None:
        rename, config_json = stored
        return EngineModel(rename, {**config_json, "dtype": name, "torch_dtype": name}, "lm_head")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise UnsupportedError(
            f"export: no engine supports a {type(model).__name__}. A Llama of octavo.lab.models and models of Hugging "
            "Face's transformers can be exported."
        )
    known = json.loads(config.to_json_string())
    known.pop("quantization_config", None)  # from the checkpoint it was loaded from
    last = getattr(model, "get_output_embeddings", lambda: None)()
    head = next((unwrapped_name(name) for name, module in model.named_modules() if module is last), "")
    settings = {**known, "architectures": [type(model).__name__], "dtype": name}
    if known.get("model_type") == "mixtral":
        return EngineModel(
            str, settings, head, ("w1", "w3", "w2"), lambda module: module.replace(".mlp", ".block_sparse_moe")
        )
    return EngineModel(str, settings, head)
