"""Quantise and dequantise: the specification that every kernel is held to, in plain PyTorch, on any device.

codes = round(x * inverse)   saturated to the format's range, one (scale, inverse) a tile
x     ~ codes * scale
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3, Format
from octavo.numerics.granularity import PER_ROW, Granularity, tile_amax
from octavo.numerics.random import random_bits
from octavo.numerics.scaling import Scaling, scale_from_amax

Rounding = Literal["nearest", "stochastic"]


class Quantized(NamedTuple):
    """An (R, C) matrix in FP8.

    codes: (R, C), a float8 dtype.  scale: FP32, the shape that `granularity.scale_shape(R, C)` gives.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def t(self) -> Quantized:
        """Return the transposed matrix, a view: the same codes and scales, nothing is rounded again."""
        return Quantized(self.codes.t(), self.scale.t(), self.granularity.transposed)


def quantize(
    x: Tensor,
    fmt: Format = E4M3,
    granularity: Granularity = PER_ROW,
    scaling: Scaling = "power_of_two",
    rounding: Rounding = "nearest",
    seed: int | Tensor = 0,
) -> Quantized:
    """Quantise a matrix.

    Finite values saturate at the format's maximum. NaN stays NaN and an infinity becomes NaN; neither touches the
    scale of its neighbours.

    Args:
        x: (R, C), FP32, BF16 or FP16. R or C may be 0.
        seed: for stochastic rounding; the same seed gives the same codes on every device.

    Raises:
        ConfigError: x is not a matrix, or the scaling is unknown.
    """
    if x.dim() != 2:
        raise ConfigError(f"quantize takes a matrix, got shape {tuple(x.shape)}: flatten the leading dimensions first.")
    scale, inverse = scale_from_amax(tile_amax(x, granularity), fmt, scaling)
    if x.numel() == 0:
        return Quantized(x.to(fmt.dtype), scale, granularity)
    scaled = granularity.tiles(x.float()) * inverse[:, None, :, None]
    scaled = granularity.untile(scaled, *x.shape)
    if rounding == "stochastic":
        scaled = _round_stochastic(scaled, fmt, seed)
    return Quantized(to_codes(scaled, fmt), scale, granularity)


def to_codes(x: Tensor, fmt: Format) -> Tensor:
    """Round FP32 values to the nearest code, ties to even; saturate what is finite, give NaN for what is not."""
    # A cast alone will not do: whether it saturates differs between PyTorch versions, and compiled casts turn
    # infinities into the largest finite value, even in E5M2, which has them. NaN is what every one of them hands on;
    # its sign is set here, since processors differ in it.
    return torch.where(x.abs() < torch.inf, x.clamp(-fmt.max, fmt.max), torch.nan).to(fmt.dtype)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return codes * scale as an (R, C) matrix of `dtype`. With power-of-two scales it is exact, in BF16 too.

    The one limit is BF16's own: below 2^-133 it has no values.
    """
    codes = quantized.codes.float()
    if codes.numel() == 0:
        return codes.to(dtype)
    return (codes * quantized.granularity.expand(quantized.scale, *codes.shape)).to(dtype)


def _round_stochastic(x: Tensor, fmt: Format, seed: int | Tensor) -> Tensor:
    """Round FP32 values to a neighbour that the format holds, up with the probability of the distance from below."""
    magnitude = x.abs().clamp(max=fmt.max)
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=128 - fmt.bias)  # the smallest normal's, below it
    quantum = ((exponent - fmt.mantissa_bits) << 23).view(torch.float32)
    steps = magnitude / quantum  # exact: the quantum is a power of two
    below = steps.floor()
    uniform = (random_bits(seed, tuple(x.shape), x.device) >> 8).float() * 2.0**-24
    rounded = (below + (uniform < steps - below).float()) * quantum
    return torch.where(x.isfinite(), rounded.copysign(x), x)
