"""`kernels.storage` in Triton; results equal `reference.py` bit for bit.

Codes occupy the top bits of an int32, the sign of a signed format in the sign bit; lower bits are ignored. So decoding
is a shift and a mask, and rounding may carry from the mantissa into the exponent without unpacking either.
"""

from __future__ import annotations

import struct
from typing import Any

import triton
import triton.language as tl

from octavo.kernels.storage import BF16, E4M3, FP16, FP32, Storage
from octavo.kernels.triton.codes import INTERPRETED

NONE: tl.constexpr = tl.constexpr(0)
TENSOR: tl.constexpr = tl.constexpr(1)
GROUP: tl.constexpr = tl.constexpr(2)

DROPPED_BF16: tl.constexpr = tl.constexpr(BF16.dropped)
DROPPED_FP16: tl.constexpr = tl.constexpr(FP16.dropped)
DROPPED_E4M3: tl.constexpr = tl.constexpr(E4M3.dropped)
"""Tags of the formats that the hardware converts."""

# Fields of a `packed` storage, a constexpr tuple: mantissa bits dropped, shift, bits per code, FP32 bits of the largest
# value, signed, scaling, root.


def packed(storage: Storage) -> tuple[Any, ...]:
    """Return a storage as a constexpr tuple."""
    fmt = storage.float
    limit = struct.unpack("<i", struct.pack("<f", fmt.max))[0]
    scaling = {"none": NONE, "tensor": TENSOR, "group": GROUP}[storage.scaling].value
    bits = 32 if fmt is FP32 else fmt.bits
    return (fmt.dropped, fmt.shift, bits, limit, fmt.signed, scaling, storage.root)


@triton.jit
def as_bits(x):
    """FP32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """int32 as FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(top, FORMAT: tl.constexpr):
    """Codes without signs, aligned with FP32's exponent and mantissa."""
    BITS: tl.constexpr = FORMAT[2] - 1 if FORMAT[4] else FORMAT[2]
    return (top >> (32 - FORMAT[2] - FORMAT[0])) & (((1 << BITS) - 1) << FORMAT[0])


@triton.jit
def sign_of(bits):
    """The sign bit alone."""
    return bits & -2147483648


@triton.jit
def top_of(bits, FORMAT: tl.constexpr):
    """Shift codes from FP32's exponent and mantissa to the top bits; signs stay in place."""
    top = bits << (32 - FORMAT[2] - FORMAT[0])
    if FORMAT[4] and FORMAT[2] + FORMAT[0] < 32:
        if INTERPRETED:
            top = sign_of(bits) | (top & 0x7FFFFFFF)
        else:  # one instruction, which the compiler does not find
            SIGNED: tl.constexpr = "lop3.b32 $0, $1, $2, 0x7FFFFFFF, 0xD8;"
            top = tl.inline_asm_elementwise(SIGNED, "=r,r,r", [bits, top], tl.int32, True, 1)
    return top


@triton.jit
def round_up(bits, DROPPED: tl.constexpr, random, STOCHASTIC: tl.constexpr):
    """Round FP32 bits, DROPPED of which are cleared later: to nearest, ties to even; STOCHASTIC: by 16 random bits."""
    if DROPPED == 0:
        bits = bits
    elif not STOCHASTIC:
        bits = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    elif DROPPED > 16:
        bits = bits + ((random << (DROPPED - 16)) | (1 << (DROPPED - 17)))
    else:
        bits = bits + (random >> (16 - DROPPED))
    return bits


@triton.jit
def round_root(x, bits, FORMAT: tl.constexpr, random):
    """Round the bits of roots x >= 0 stochastically, so that the squares average to x^2. See the reference."""
    below = bits & -(1 << FORMAT[0])
    a = as_float(below) * (1.0 / FORMAT[1])
    b = as_float(below + (1 << FORMAT[0])) * (1.0 / FORMAT[1])
    share = (random.to(tl.float32) + 0.5) * 1.52587890625e-05  # 2^-16
    return tl.where(share * ((b - a) * (b + a)) < (x - a) * (x + a), below + (1 << FORMAT[0]), below)


@triton.jit
def bits_of(x, FORMAT: tl.constexpr):
    """FP32 bits of x * shift, which begin with the format's code; NaN, in formats that have it, as all ones.

    A GPU's NaN is 0x7FFFFFFF, which rounding would carry into the sign.
    """
    bits = as_bits(x * FORMAT[1])
    if FORMAT[4]:
        NAN: tl.constexpr = ((1 << (FORMAT[2] - 1)) - 1) << FORMAT[0]
        if INTERPRETED:
            bits = tl.where(x == x, bits, NAN)
        else:
            bits = tl.minimum(bits, NAN)
    return bits


@triton.jit
def encode(x, FORMAT: tl.constexpr, random, STOCHASTIC: tl.constexpr):
    """Codes of FP32 values within the format's range, in the top bits of int32."""
    if FORMAT[0] == DROPPED_BF16 and not STOCHASTIC and not INTERPRETED:
        TO_BF16: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;"
        top = tl.inline_asm_elementwise(TO_BF16, "=r,f", [x], tl.int32, True, 1)
    else:
        top = top_of(encoded(x, FORMAT, random, STOCHASTIC), FORMAT)
    return top


@triton.jit
def encoded(x, FORMAT: tl.constexpr, random, STOCHASTIC: tl.constexpr):
    """Codes aligned with FP32's exponent and mantissa; the bits below are not yet cleared."""
    bits = bits_of(x, FORMAT)
    if FORMAT[6] and STOCHASTIC:
        bits = round_root(x, bits, FORMAT, random)
    else:
        bits = round_up(bits, FORMAT[0], random, STOCHASTIC)
    if not FORMAT[4]:
        bits = tl.maximum(bits, tl.minimum(as_bits(x), 1 << FORMAT[0]))  # a positive value has at least the code 1
    return bits


@triton.jit
def decode(top, FORMAT: tl.constexpr):
    """Decode codes in the top bits to FP32; NaN stays NaN."""
    if FORMAT[0] == DROPPED_FP16:
        x = (top >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = magnitude_of(top, FORMAT)
        if FORMAT[4]:
            bits = bits | sign_of(top)
        x = as_float(bits) * (1.0 / FORMAT[1])
        if FORMAT[0] == DROPPED_E4M3:
            x = tl.where((top & 0x7F000000) == 0x7F000000, float("nan"), x)
    return x


@triton.jit
def rounded(bits, FORMAT: tl.constexpr):
    """Decode the result of `encoded` to FP32: equals `decode` of the codes, except for NaN."""
    return as_float(bits & -(1 << FORMAT[0])) * (1.0 / FORMAT[1])


@triton.jit
def scale_code(amax, LIMIT: tl.constexpr):
    """E8M0 codes, int32, of the smallest power-of-two scales with amax <= scale * max.

    amax: FP32 bits. LIMIT: FP32 bits of max, the format's largest value.
    """
    exponent = (amax + (0x7FFFFF - (LIMIT & 0x7FFFFF))) >> 23
    return tl.minimum(tl.maximum(exponent + (127 - (LIMIT >> 23)), 1), 253)


@triton.jit
def scale_of(code):
    """The FP32 scale of an E8M0 code."""
    return as_float(code << 23)


@triton.jit
def inverse_of(code):
    """The FP32 reciprocal of the scale of an E8M0 code."""
    return as_float((254 - code) << 23)
