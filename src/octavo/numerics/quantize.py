"""Quantise and dequantise: the specification of every kernel, in plain PyTorch, on any device.

codes = round(x * inverse)   saturated to the range of the format, one (scale, inverse) per tile
x     ~ codes * scale
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.numerics.formats import E4M3, NARROW, Format, format_named
from octavo.numerics.granularity import PER_ROW, Granularity, granularity_named, tile_amax
from octavo.numerics.rotation import block_for, rotate
from octavo.numerics.scaling import Scaling, scale_from_amax

Rounding = Literal["nearest", "stochastic"]


class Quantized(NamedTuple):
    """An (R, C) matrix in eight bits.

    codes: (R, C), a float8 dtype or int8.  scale: FP32, the shape that `granularity.scale_shape(R, C)` gives.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def t(self) -> Quantized:
        """Return the transposed matrix, a view: the same codes and scales, nothing is rounded again."""
        return Quantized(self.codes.t(), self.scale.t(), self.granularity.transposed)


def quantize(
    x: Tensor,
    fmt: Format | str = E4M3,
    granularity: Granularity | str = PER_ROW,
    scaling: Scaling = "power_of_two",
    rounding: Rounding = "nearest",
    seed: int | Tensor = 0,
    rotation: int = 0,
) -> Quantized:
    """Quantise a matrix, rotated along its rows first if there is a rotation.

    Finite values saturate at the format's maximum. NaN stays NaN and an infinity becomes NaN; neither touches the
    scale of its neighbours. An integer format has no NaN: codes of a tile with such a value are 0, its scale is NaN.

    Args:
        x: (R, C), FP32, BF16 or FP16. R or C may be 0.
        fmt: a format or its name, such as `e5m2`.
        granularity: a granularity or its name, such as `1x128`.
        seed: seed of stochastic rounding; it gives the same codes on every device.
        rotation: largest block of the rotation (`octavo.numerics.rotation.block_for`), negative for Sylvester's
            matrices; 0: none.

    Raises:
        ConfigError: x is not a matrix, or the format, granularity, scaling or rounding is unknown.
    """
    fmt = format_named(fmt) if isinstance(fmt, str) else fmt
    granularity = granularity_named(granularity) if isinstance(granularity, str) else granularity
    if rounding not in get_args(Rounding):
        near = did_you_mean(rounding, get_args(Rounding))
        raise ConfigError(f"unknown rounding '{rounding}'.{near} Roundings: {', '.join(get_args(Rounding))}.")
    if not isinstance(x, Tensor):
        raise ConfigError(f"quantize takes a matrix as a tensor, got {type(x).__name__}.")
    if x.dim() != 2:
        raise ConfigError(f"quantize takes a matrix, got shape {tuple(x.shape)}: flatten the leading dimensions first.")
    if rotation:
        x = rotate(x, block_for(x.shape[1], rotation))
    scale, inverse = scale_from_amax(tile_amax(x, granularity), fmt, scaling)
    if x.numel() == 0:
        return Quantized(x.to(fmt.dtype), scale, granularity)
    if fmt.is_integer:
        finite = _is_finite(x, granularity)
        scale, inverse = torch.where(finite, scale, torch.nan), torch.where(finite, inverse, 0.0)
    scaled = granularity.tiles(x.float()) * inverse[:, None, :, None]
    scaled = granularity.untile(scaled, *x.shape)
    if rounding == "stochastic":
        scaled = _round_stochastic(scaled, fmt, seed)
    return Quantized(to_codes(scaled, fmt), scale, granularity)


def to_codes(x: Tensor, fmt: Format) -> Tensor:
    """Round FP32 values to the nearest code, ties to even; saturate what is finite, give NaN for what is not.

    In an integer format, which has no NaN, the code of what is not finite is 0.
    """
    if fmt.is_integer:
        return torch.where(x.abs() < torch.inf, x.clamp(-fmt.max, fmt.max).round(), 0.0).to(fmt.dtype)
    # A cast alone is not enough: whether it saturates depends on the PyTorch version, and compiled casts turn
    # infinities into the largest finite value, even in E5M2, which has infinities. All of them preserve NaN. Its sign
    # is set here, since processors differ in it.
    x = torch.where(x.abs() < torch.inf, x.clamp(-fmt.max, fmt.max), torch.nan)
    return (_round_narrow(x, fmt) if fmt.name in NARROW else x).to(fmt.dtype)


def _is_finite(x: Tensor, granularity: Granularity) -> Tensor:
    """Return whether all values of each tile are finite, in the shape of the scales."""
    return tile_amax((~x.isfinite()).float(), granularity) == 0


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return codes * scale as an (R, C) matrix of `dtype`. With power-of-two scales it is exact.

    That includes BF16, down to 2^-133, its smallest value.
    """
    codes = quantized.codes.float()
    if codes.numel() == 0:
        return codes.to(dtype)
    return (codes * quantized.granularity.expand(quantized.scale, *codes.shape)).to(dtype)


def _round_stochastic(x: Tensor, fmt: Format, seed: int | Tensor) -> Tensor:
    """Round FP32 values up or down to a value of the format, up with the probability of the distance from below."""
    magnitude = x.abs().clamp(max=fmt.max)
    quantum = _quantum(magnitude, fmt)
    steps = magnitude / quantum  # exact: the quantum is a power of two
    below = steps.floor()
    uniform = (random_bits(seed, tuple(x.shape), x.device) >> 8).float() * 2.0**-24
    rounded = (below + (uniform < steps - below).float()) * quantum
    return torch.where(x.isfinite(), rounded.copysign(x), x)


def _round_narrow(x: Tensor, fmt: Format) -> Tensor:
    """Round FP32 values in a format's range to nearest, ties to even; NaN stays NaN. An E4M3 cast is then exact."""
    quantum = _quantum(x.abs(), fmt)
    return torch.where(x.isnan(), x, ((x.abs() / quantum).round() * quantum).copysign(x))


def _quantum(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return the spacing of a format's values around each of these, FP32 powers of two."""
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=128 - fmt.bias)  # subnormals: as the smallest normal
    return ((exponent - fmt.mantissa_bits) << 23).view(torch.float32)


# Random bits from a counter: Philox-4x32-10 (Salmon et al., SC'11, section 3.3). They depend only on the seed and the
# index of the element, so codes are the same on every device, in every order, and after a resume. Triton's
# `tl.randint(seed, offset)` gives the same stream.
_MASK = 0xFFFFFFFF
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)


def random_bits(seed: int | Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 values in [0, 2^32): element i (row-major) is drawn for counter i.

    Args:
        seed: 64 bits; as an int64 tensor of one element it stays on its device.
    """
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    return random_words(seed, counter)[0].reshape(shape)


def random_words(
    seed: int | Tensor, counter: Tensor, stream: int | Tensor = 0, step: int | Tensor = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter, int64 values in [0, 2^32), in the shape of `counter`.

    Args:
        seed: 64 bits; as an int64 tensor of one element it stays on its device.
        counter: int64, the low 32 bits of the counter.
        stream: second word of the counter, 32 bits; int64 if a tensor.
        step: third word, as `stream`.
    """
    c0: Any = counter & _MASK
    c1, c2, c3 = cast(Any, stream), cast(Any, step), cast(Any, 0)  # scalars until the rounds mix them in
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER[0])
        high1, low1 = _multiply(c2, _MULTIPLIER[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEP[0]) & _MASK, (k1 + _KEY_STEP[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and low 32 bits of a 32 x 32 bit product; int64 wraps, which keeps all 64 bits."""
    product = x * factor
    return (product >> 32) & _MASK, product & _MASK
