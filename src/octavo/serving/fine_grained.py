"""The format `fp8`: 128x128 blocks of weights with FP32 scales, as DeepSeek-V3 is published (arXiv 2412.19437, 3.3.1).

What vLLM, SGLang and Hugging Face's transformers read as `quant_method: fp8`. Of a layer it has `weight`, float8_e4m3fn
(N, K), and `weight_scale_inv`, FP32 (N / 128, K / 128) rounded up, which in spite of its name multiplies the codes.
Engines quantise inputs by 1x128.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from octavo.serving.layers import ServedLayer

NAME = "fp8"


def refuses(layer: ServedLayer) -> str | None:
    """Return why the format cannot hold a layer, or None."""
    if layer.target.format != "e4m3" or layer.input.format != "e4m3":
        return "it is not E4M3 throughout"
    if (layer.target.granularity, layer.input.granularity) != ("128x128", "1x128"):
        has = f"scales by {layer.target.granularity} and {layer.input.granularity}"
        return f"it has {has}, and the format by 128x128 and 1x128, as recipe 'block'"
    return None


def tensors(layer: ServedLayer) -> dict[str, Tensor]:
    """Return what is stored of a layer beside its bias, by the last part of its name."""
    return {"weight": layer.weight.codes, "weight_scale_inv": layer.weight.scale}


def config(layers: Sequence[ServedLayer], others: Collection[str]) -> dict[str, Any]:
    """Return `quantization_config`. Names are the engine's; `others` are its layers in high precision."""
    powers = all(layer.target.scaling == "power_of_two" for layer in layers)
    return {
        "quant_method": NAME,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(others),
        **({"scale_fmt": "ue8m0"} if powers else {}),
    }
