"""The formats of layers in eight bits that inference engines load. A value is code times scale in both.

`compressed-tensors`: scales per channel, tensor or block for weights, per token or tensor for inputs; read by vLLM,
SGLang and Hugging Face's transformers as `quant_method: compressed-tensors`. Per layer: `weight`, float8_e4m3fn (N, K),
`weight_scale`, FP32, and with static scales `input_scale`, FP32 (1,). Or INT8 codes; the rotation of inputs is then a
transform of `transform_config`, by blocks of `head_dim`, with its matrix in the file as `rotation_<size>_input.weight`,
BF16 (size, size) of +-1, which engines divide by the root of its size. Its type is not `hadamard`, by which engines
mean Sylvester's matrices, and run a kernel of their own: a `random-hadamard` is read from the file.

`fp8`: 128x128 blocks with FP32 scales, as in the published DeepSeek-V3 (arXiv 2412.19437, 3.3.1); read by the same
engines as `quant_method: fp8`. Per layer: `weight`, float8_e4m3fn (N, K), and `weight_scale_inv`, FP32 (N / 128,
K / 128) rounded up, which despite its name multiplies the codes. Engines quantise inputs by 1x128.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo.numerics.rotation import hadamard
from octavo.serving.layers import ServedLayer

COMPRESSED_TENSORS, BLOCKS = "compressed-tensors", "fp8"
_NUMBERS: dict[str, dict[str, Any]] = {
    "e4m3": {"num_bits": 8, "type": "float", "symmetric": True},
    "int8": {"num_bits": 8, "type": "int", "symmetric": True},
}
_FORMATS = {"e4m3": "float-quantized", "int8": "int-quantized"}
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


def _compressed_reason(layer: ServedLayer) -> str | None:
    """Return why the format cannot store a layer, or None."""
    operands = (("weight", layer.target, _WEIGHTS), ("input", layer.input, _INPUTS))
    for role, operand, known in operands:
        if operand.format not in _NUMBERS:
            return f"its {role} is {operand.format.upper()}, but the format requires E4M3 or INT8"
        if operand.granularity not in known:
            return f"its {role} has scales by {operand.granularity}, but the format supports {', '.join(known)}"
    if layer.rotation < 0:
        return "its input is rotated by Sylvester's matrices, but the export writes regular ones"
    if layer.is_expert and layer.rotation:
        return "its input is rotated, and engines rotate inputs of linear layers, not of experts"
    return None


def _compressed_tensors(layer: ServedLayer) -> dict[str, Tensor]:
    """Return the stored tensors of a layer without its bias, by the last part of their names."""
    scale = layer.weight.scale
    if layer.target.granularity == "tensor":  # a copy: fused layers share their scale
        scale = scale.reshape(1).clone()
    stored = {"weight": layer.weight.codes, "weight_scale": scale}
    return stored if layer.input_scale is None else {**stored, "input_scale": layer.input_scale}


def _compressed_config(layers: Sequence[ServedLayer], others: Collection[str]) -> dict[str, Any]:
    """Return `quantization_config`, under the engine's names; `others` are layers in high precision."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    kinds = {_FORMATS[layer.target.format] for layer in layers}
    for layer in layers:
        scheme = _compressed_scheme(layer)
        if len(kinds) > 1:
            scheme["format"] = _FORMATS[layer.target.format]
        groups.setdefault(json.dumps(scheme), (scheme, []))[1].append(layer.name)
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if len(groups) == 1 else names, **scheme}
            for number, (scheme, names) in enumerate(groups.values())
        },
        "ignore": list(others),
        "kv_cache_scheme": None,
        **_transforms(layers),
    }


def _compressed_scheme(layer: ServedLayer) -> dict[str, Any]:
    is_dynamic, numbers = layer.input_scale is None, _NUMBERS[layer.target.format]
    return {
        "weights": {**numbers, **_WEIGHTS[layer.target.granularity], "dynamic": False},
        "input_activations": {**numbers, **_INPUTS[layer.input.granularity], "dynamic": is_dynamic},
        "output_activations": None,
    }


def _transforms(layers: Sequence[ServedLayer]) -> dict[str, Any]:
    """Return the entry of the configuration that says how inputs are rotated; empty if none are.

    One transform per size of blocks. Stored weights are rotated already: engines skip `weight_input`.
    """
    groups = {
        _rotation_name(block): {
            "type": "random-hadamard",
            "head_dim": block,
            "apply": [
                {"targets": names, "location": "input"},
                {"targets": names, "location": "weight_input", "inverse": True},
            ],
        }
        for block, names in _rotated(layers).items()
    }
    return {"transform_config": {"config_groups": groups}} if groups else {}


def _rotated(layers: Sequence[ServedLayer]) -> dict[int, list[str]]:
    """Return the names of rotated layers by the size of their blocks."""
    names: dict[int, list[str]] = {}
    for layer in layers:
        if layer.rotation:
            names.setdefault(layer.rotation, []).append(layer.name)
    return names


def _rotation_name(block: int) -> str:
    return f"rotation_{block}"


def _rotation_matrices(layers: Sequence[ServedLayer]) -> dict[str, Tensor]:
    """Return the matrix of each rotated layer by its name in the file; layers may be loaded by different ranks."""
    return {
        f"{name}.{_rotation_name(block)}_input.weight": (hadamard(block) * block**0.5).bfloat16()
        for block, names in _rotated(layers).items()
        for name in names
    }


def _blocks_reason(layer: ServedLayer) -> str | None:
    """Return why the format cannot store a layer, or None."""
    if layer.target.format != "e4m3" or layer.input.format != "e4m3":
        return "it is not all E4M3"
    if (layer.target.granularity, layer.input.granularity) != ("128x128", "1x128"):
        has = f"scales by {layer.target.granularity} and {layer.input.granularity}"
        return f"it has {has}, but the format requires 128x128 and 1x128, as in recipe 'block'"
    return None


def _blocks_tensors(layer: ServedLayer) -> dict[str, Tensor]:
    """Return the stored tensors of a layer without its bias, by the last part of their names."""
    return {"weight": layer.weight.codes, "weight_scale_inv": layer.weight.scale}


def _blocks_config(layers: Sequence[ServedLayer], others: Collection[str]) -> dict[str, Any]:
    """Return `quantization_config`, under the engine's names; `others` are layers in high precision."""
    powers = all(layer.target.scaling == "power_of_two" for layer in layers)
    return {
        "quant_method": BLOCKS,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(others),
        **({"scale_fmt": "ue8m0"} if powers else {}),
    }


class Format(NamedTuple):
    """Storage of layers in eight bits."""

    unsupported_reason: Callable[[ServedLayer], str | None]
    """Why the format cannot store a layer, or None."""
    tensors: Callable[[ServedLayer], dict[str, Tensor]]
    """Stored tensors of a layer without its bias, by the last part of their names."""
    config: Callable[[Sequence[ServedLayer], Collection[str]], dict[str, Any]]
    """`quantization_config` for the layers and the names of the others, both under the engine's names."""
    constants: Callable[[Sequence[ServedLayer]], dict[str, Tensor]] = lambda layers: {}
    """Tensors beside those of the layers, which training does not change."""


FORMATS: dict[str, Format | None] = {
    COMPRESSED_TENSORS: Format(_compressed_reason, _compressed_tensors, _compressed_config, _rotation_matrices),
    BLOCKS: Format(_blocks_reason, _blocks_tensors, _blocks_config),
    "plain": None,
}
"""Formats by name; `plain` stores values in high precision."""
