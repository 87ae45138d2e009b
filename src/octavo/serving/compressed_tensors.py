"""The format `compressed-tensors`: FP8 weights with a scale a channel, a tensor or a block, inputs by token or tensor.

What vLLM, SGLang and Hugging Face's transformers read as `quant_method: compressed-tensors`. Of a layer it has
`weight`, float8_e4m3fn (N, K), `weight_scale`, FP32, and with static scales `input_scale`, FP32 (1,). A value is code
times scale.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from octavo.serving.layers import ServedLayer

NAME = "compressed-tensors"
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "row": {"strategy": "channel"},
    "128x128": {"strategy": "block", "block_structure": [128, 128]},
}
_INPUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "row": {"strategy": "token"},
    "1x128": {"strategy": "group", "group_size": 128},
}


def refuses(layer: ServedLayer) -> str | None:
    """Return why the format cannot hold a layer, or None."""
    operands = (("weight", layer.target, _WEIGHTS), ("input", layer.input, _INPUTS))
    for role, operand, known in operands:
        if operand.format != "e4m3":
            return f"its {role} is {operand.format.upper()}, and the format knows E4M3"
        if operand.granularity not in known:
            return f"its {role} has scales by {operand.granularity}, and the format has them by {', '.join(known)}"
    return None


def tensors(layer: ServedLayer) -> dict[str, Tensor]:
    """Return what is stored of a layer beside its bias, by the last part of its name."""
    scale = layer.weight.scale
    if layer.target.granularity == "tensor":  # of its own: layers that are computed as one share it
        scale = scale.reshape(1).clone()
    stored = {"weight": layer.weight.codes, "weight_scale": scale}
    return stored if layer.input_scale is None else {**stored, "input_scale": layer.input_scale}


def config(layers: Sequence[ServedLayer], others: Collection[str]) -> dict[str, Any]:
    """Return `quantization_config`. Names are the engine's; `others` are its layers in high precision."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for layer in layers:
        scheme = _scheme(layer)
        groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(layer.name)
    return {
        "quant_method": NAME,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if len(groups) == 1 else names, **scheme}
            for number, (scheme, names) in enumerate(groups.values())
        },
        "ignore": list(others),
        "kv_cache_scheme": None,
    }


def _scheme(layer: ServedLayer) -> dict[str, Any]:
    is_dynamic = layer.input_scale is None
    return {
        "weights": {**_NUMBERS, **_WEIGHTS[layer.target.granularity], "dynamic": False},
        "input_activations": {**_NUMBERS, **_INPUTS[layer.input.granularity], "dynamic": is_dynamic},
        "output_activations": None,
    }
