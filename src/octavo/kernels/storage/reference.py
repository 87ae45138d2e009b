"""Reference codec of `kernels.storage` in plain PyTorch, on groups (G, 128), zero-padded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.storage import GROUP, Float, groups_of


def to_groups(x: Tensor) -> Tensor:
    """Return a matrix (R, C) as groups (R * ceil(C / 128), 128), zero-padded."""
    cols = x.shape[1]
    return F.pad(x, (0, groups_of(cols) * GROUP - cols)).reshape(-1, GROUP)


def from_groups(groups: Tensor, rows: int, cols: int) -> Tensor:
    """Undo `to_groups`."""
    return groups.reshape(rows, groups_of(cols) * GROUP)[:, :cols]


def bits_in(codes: Tensor) -> Tensor:
    """Return codes of one or two bytes as non-negative int32."""
    if codes.element_size() == 1:
        return codes.view(torch.uint8).int()
    return codes.view(torch.int16).int() & 0xFFFF


def store(bits: Tensor, codes: Tensor) -> None:
    """Write int32 codes, in groups, to a tensor of one or two bytes per code."""
    flat = from_groups(bits, *codes.shape)
    if codes.element_size() == 1:
        codes.view(torch.uint8).copy_(flat)
    else:
        codes.view(torch.int16).copy_(flat)  # copy_ keeps the low bits


def encode(x: Tensor, fmt: Float, random: Tensor | None = None, never_zero: bool = False, root: bool = False) -> Tensor:
    """Encode FP32 values within the range of the format to codes, as bits of int32.

    Args:
        random: int32 in [0, 2^16), for stochastic rounding; None rounds to nearest, ties to even.
        never_zero: encode positive normal values as at least 1.
        root: with `random`, round the root x such that x^2 is unbiased, rather than x.
    """
    bits = bits_of(x, fmt)
    if root and random is not None:
        code = round_root(x, bits, fmt, random)
    else:
        code = round_off(bits & 0x7FFFFFFF, fmt.dropped, random)
    if never_zero:
        code = torch.maximum(code, (x.view(torch.int32) >> fmt.dropped).clamp(max=1))
    sign_bit = fmt.bits - 1
    return code & ((1 << sign_bit) - 1) | (bits >> 31 & 1) << sign_bit if fmt.signed else code


def bits_of(x: Tensor, fmt: Float) -> Tensor:
    """Return the shifted FP32 bits as int32, with the code in the top bits; NaN, if the format has it, as all ones."""
    bits = (x * fmt.shift).view(torch.int32)
    return torch.where(x.isnan(), ((1 << (fmt.bits - 1)) - 1) << fmt.dropped, bits) if fmt.signed else bits


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude per row, (R, 1), ignoring NaN."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(dim=1, keepdim=True)


def decode(code: Tensor, fmt: Float) -> Tensor:
    """Decode codes (int32) to FP32, including NaN."""
    if not fmt.signed:
        return (code << fmt.dropped).view(torch.float32) * (1 / fmt.shift)
    whole = torch.uint8 if fmt.bits == 8 else torch.int16
    return code.to(whole).view(fmt.dtype).float()


def round_off(bits: Tensor, dropped: int, random: Tensor | None) -> Tensor:
    """Round off the low `dropped` bits of non-negative int32. `random` as for `encode`."""
    if dropped == 0:
        return bits
    if random is None:
        return (bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped
    if dropped >= 16:
        # Adds half a unit of the random bits: without it, rounding would be biased downward by as much.
        return (bits + (random << (dropped - 16)) + (1 << dropped >> 17)) >> dropped
    return (bits + (random >> (16 - dropped))) >> dropped


def round_root(x: Tensor, bits: Tensor, fmt: Float, random: Tensor) -> Tensor:
    """Round roots x >= 0, with bits from `bits_of`, to codes such that the expected square is x^2.

    Between adjacent codes a and b, rounds up with probability (x^2 - a^2) / (b^2 - a^2). With unbiased rounding of x,
    the expected square would be x^2 + (x - a)(b - x), and a second moment would drift up by that much per step. The
    left side of the comparison is exact in FP32.
    """
    below = bits & -(1 << fmt.dropped)
    a, b = ((below + step).view(torch.float32) * (1 / fmt.shift) for step in (0, 1 << fmt.dropped))
    up = (random.float() + 0.5) * 2.0**-16 * ((b - a) * (b + a)) < (x - a) * (x + a)
    return (below >> fmt.dropped) + up.int()


def scale_code(amax: Tensor, fmt: Float) -> Tensor:
    """Return the E8M0 codes (int32) of the smallest power of two with amax <= scale * max, at least 2^-126."""
    limit = torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32).item()
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - (int(limit) >> 23) + 127 + ((bits & 0x7FFFFF) > (int(limit) & 0x7FFFFF)).int()
    return exponent.clamp(1, 253)


def scale_of(code: Tensor) -> Tensor:
    """Return the FP32 scale of an E8M0 code (int32)."""
    return (code << 23).view(torch.float32)


def inverse_of(code: Tensor) -> Tensor:
    """Return the reciprocal of the scale of an E8M0 code (int32), FP32."""
    return ((254 - code) << 23).view(torch.float32)


def join(high: Tensor, low: Tensor, bits: int, dropped: int) -> Tensor:
    """Combine a code and a signed remainder of `bits` bits into magnitude bits.

    If the code was set to 0 in the meantime, a negative remainder is clamped to 0.
    """
    return ((high << bits) + low).clamp(min=0) << dropped


def split(magnitude: Tensor, bits: int, dropped: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split magnitude bits into (code, remainder): the nearest code, ties away from zero.

    The `dropped` bits below the remainder are rounded off first, so that codes may be off by one near a tie; lossless
    if `dropped` is 0.
    """
    rounded = round_off(magnitude, dropped, random)
    high = (rounded + (1 << (bits - 1))) >> bits
    return high, rounded - (high << bits)


TINY = 2.0**-100
"""Dividends below it flush to 0: the fast correctly rounded sequence lacks the bits there."""
LEAST_DIVISOR = 2.0**-70
"""Smallest divisor of an update. The square of a gradient below it is lost in FP32: without a bound, such gradients,
divided by a root of 0 and a small eps, would give updates of any size."""


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root, FP32, also of subnormal values."""
    return x.double().sqrt().float()  # not correctly rounded on every CPU in FP32


def quotient(x: Tensor, by: Tensor) -> Tensor:
    """Return x / max(by, LEAST_DIVISOR), correctly rounded; 0 for |x| < TINY, NaN on overflow."""
    quotient = x / by.clamp(min=LEAST_DIVISOR)
    return torch.where(x.abs() < TINY, 0.0, torch.where(quotient.isinf(), torch.nan, quotient))
