"""Write and read values as `kernels.storage` says, in plain PyTorch, in groups: (G, 128), zeros behind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.storage import GROUP, Float, groups_of


def to_groups(x: Tensor) -> Tensor:
    """Return a matrix (R, C) as its groups, (R * ceil(C / 128), 128); a short one is filled with zeros."""
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
    """Write int32 codes, in groups, into memory of one or two bytes each."""
    flat = from_groups(bits, *codes.shape)
    if codes.element_size() == 1:
        codes.view(torch.uint8).copy_(flat)
    else:
        codes.view(torch.int16).copy_(flat)  # the same bits: copy_ keeps the low ones


def encode(x: Tensor, fmt: Float, random: Tensor | None = None, never_zero: bool = False, root: bool = False) -> Tensor:
    """Return the codes of FP32 values within the format's range, int32 holding its bits.

    Args:
        random: int32 in [0, 2^16): round up with the probability of the distance from below; to nearest where None,
            ties to even.
        never_zero: a positive normal value has at least the code 1.
        root: x is a root whose square is kept on average, not x itself; with `random`.
    """
    bits = bits_of(x, fmt)
    if root and random is not None:
        code = round_root(x, bits, fmt, random)
    else:
        code = round_off(bits & 0x7FFFFFFF, fmt.dropped, random)
    if never_zero:
        code = torch.maximum(code, (x.view(torch.int32) >> fmt.dropped).clamp(max=1))
    sign_at = fmt.bits - 1
    return code & ((1 << sign_at) - 1) | (bits >> 31 & 1) << sign_at if fmt.signed else code


def bits_of(x: Tensor, fmt: Float) -> Tensor:
    """Return FP32 values as int32 that has a format's codes in its first bits; NaN, where it has one, as all ones."""
    bits = (x * fmt.shift).view(torch.int32)
    return torch.where(x.isnan(), ((1 << (fmt.bits - 1)) - 1) << fmt.dropped, bits) if fmt.signed else bits


def largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (R, 1); NaN does not count."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(dim=1, keepdim=True)


def decode(code: Tensor, fmt: Float) -> Tensor:
    """Return the FP32 values of codes (int32); the codes of NaN are NaN."""
    if not fmt.signed:
        return (code << fmt.dropped).view(torch.float32) * (1 / fmt.shift)
    whole = torch.uint8 if fmt.bits == 8 else torch.int16
    return code.to(whole).view(fmt.dtype).float()


def round_off(bits: Tensor, dropped: int, random: Tensor | None) -> Tensor:
    """Return non-negative int32 without their last `dropped` bits, rounded. Arguments as `encode` has them."""
    if dropped == 0:
        return bits
    if random is None:
        return (bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped
    if dropped >= 16:
        # Half a unit of the random bits on top: else every rounding would lean down by as much.
        return (bits + (random << (dropped - 16)) + (1 << dropped >> 17)) >> dropped
    return (bits + (random >> (16 - dropped))) >> dropped


def round_root(x: Tensor, bits: Tensor, fmt: Float, random: Tensor) -> Tensor:
    """Return the codes of roots x >= 0, of which `bits_of` gave the bits: their squares average to x^2.

    Between the codes a and b up with the probability (x^2 - a^2) / (b^2 - a^2). Rounded so that a and b average to x,
    the squares average to x^2 + (x - a)(b - x): a second moment that is read and written in every step would gain that
    much each time. The left side of the comparison is exact in FP32.
    """
    below = bits & -(1 << fmt.dropped)
    a, b = ((below + step).view(torch.float32) * (1 / fmt.shift) for step in (0, 1 << fmt.dropped))
    up = (random.float() + 0.5) * 2.0**-16 * ((b - a) * (b + a)) < (x - a) * (x + a)
    return (below >> fmt.dropped) + up.int()


def scale_code(amax: Tensor, fmt: Float) -> Tensor:
    """Return the E8M0 codes (int32) of the smallest powers of two with amax <= scale * max, at least 2^-126."""
    limit = torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32).item()
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - (int(limit) >> 23) + 127 + ((bits & 0x7FFFFF) > (int(limit) & 0x7FFFFF)).int()
    return exponent.clamp(1, 253)


def scale_of(code: Tensor) -> Tensor:
    """Return the FP32 scale of an E8M0 code (int32)."""
    return (code << 23).view(torch.float32)


def inverse_of(code: Tensor) -> Tensor:
    """Return what values are multiplied by, FP32."""
    return ((254 - code) << 23).view(torch.float32)


def join(high: Tensor, low: Tensor, bits: int, dropped: int) -> Tensor:
    """Return the magnitude bits whose first part is a code and whose rest a signed remainder of so many bits.

    Where the code has been set to 0 since, a remainder below 0 counts as 0.
    """
    return ((high << bits) + low).clamp(min=0) << dropped


def split(magnitude: Tensor, bits: int, dropped: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (code, remainder) of magnitude bits: the code is the nearest one, ties away from zero.

    `dropped` bits behind the remainder are rounded off first, so that a code may be off by one near a tie; with none,
    nothing is lost.
    """
    kept = round_off(magnitude, dropped, random)
    high = (kept + (1 << (bits - 1))) >> bits
    return high, kept - (high << bits)


TINY = 2.0**-100
"""Below which a root or a quotient counts as 0: fast sequences that round correctly have not enough bits there."""


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root, FP32, and 0 below TINY."""
    return torch.where(x < TINY, 0.0, x.double().sqrt().float())  # PyTorch's own in FP32 is not on every processor


def quotient(x: Tensor, by: Tensor) -> Tensor:
    """Return x / by, correctly rounded, by no less than TINY; 0 where x is below it, NaN where that overflows."""
    quotient = x / by.clamp(min=TINY)
    return torch.where(x.abs() < TINY, 0.0, torch.where(quotient.isinf(), torch.nan, quotient))
