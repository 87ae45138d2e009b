"""Scales from amax. Everywhere in Octavo, a value is its code times `scale`.

There is no lower bound of amax: everything is scaled, so that Q(2^-k x) = 2^-k Q(x) as long as FP32 can hold the scale.
A scale is at least 2^-126, because hardware that flushes subnormals would turn a smaller one into zero. A tile of zeros
has that scale: any would do for its codes, but scales are also folded into gradients, where that of a row of zeros must
not outweigh the others.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.numerics.formats import Format

Scaling = Literal["power_of_two", "float32", "engine"]

_SMALLEST_SCALE = 2.0**-126
_MANTISSA = 0x7FFFFF


def scale_from_amax(amax: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return (scale, inverse): the factors of codes and of values.

    `power_of_two`: the smallest power of two with amax <= scale * fmt.max, that is ceil(log2(amax / fmt.max)). It is
    computed from the bits of amax, so that no division rounds differently on another device. The exponent is rounded
    up, never down, so that the largest element does not saturate (arXiv 2506.08027, section 3).

    `float32`: amax / fmt.max and its reciprocal fmt.max / amax, each rounded once from FP64.

    `engine`: amax / fmt.max, at least 1 / (512 fmt.max), and the reciprocal of that scale, each rounded once: what
    inference engines compute from the activations of a token. It is vLLM 0.32's `QuantFP8.forward_native`
    (model_executor/layers/quantization/input_quant_fp8.py), which it compiles for scales per token; and SGLang's
    `per_token_quant_fp8_kernel` (sgl-kernel/csrc/gemm/per_token_quant_fp8.cu), which has no such floor.

    Args:
        amax: FP32, any shape, finite and not negative.

    Raises:
        ConfigError: an unknown `scaling`.
    """
    if scaling == "power_of_two":
        return _power_of_two(amax, fmt)
    if scaling == "float32":
        return _float32(amax, fmt)
    if scaling == "engine":
        return _engine(amax, fmt)
    known = get_args(Scaling)
    raise ConfigError(f"unknown scaling '{scaling}'.{did_you_mean(scaling, known)} Scalings: {', '.join(known)}.")


def _power_of_two(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    fraction, max_exponent = math.frexp(fmt.max)  # in [0.5, 1), as in FP32 the mantissa less its leading bit
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - max_exponent + 1
    exponent = exponent + ((bits & _MANTISSA) > int((2 * fraction - 1) * 2**23)).int()
    exponent = exponent.clamp(min=1)  # 2^-126
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def _float32(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    # FP64 division rounds the same way in eager mode, under a compiler and in a hand-written kernel; FP32 does not.
    exact = amax.double()
    scale = (exact / fmt.max).float().clamp(min=_SMALLEST_SCALE)
    inverse = (fmt.max / exact).float().clamp(max=1 / _SMALLEST_SCALE)
    return scale, inverse


def _engine(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    # A quotient of FP32 values, rounded to FP64 and then to FP32, is rounded correctly.
    scale = (amax.double() / fmt.max).float().clamp(min=1 / (512 * fmt.max))
    return scale, scale.double().reciprocal().float()


def to_e8m0(scale: Tensor) -> Tensor:
    """Return power-of-two scales as E8M0 codes (uint8), one byte per scale.

    Raises:
        ConfigError: a scale is not a power of two, so that one byte cannot hold it.
    """
    bits = scale.view(torch.int32)
    if bool((bits & _MANTISSA).any()) or not bool(((scale > 0) & (scale < torch.inf)).all()):
        raise ConfigError(
            "these scales are not powers of two: quantise with scaling='power_of_two' to store them as E8M0."
        )
    return (bits >> 23).to(torch.uint8)


def from_e8m0(codes: Tensor) -> Tensor:
    """Return the FP32 scales of E8M0 codes (uint8). Code 255 is NaN."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal in FP32
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))
