"""`kernels.storage` in Triton: see `reference/storage.py`, whose arithmetic this repeats."""

from __future__ import annotations

import triton
import triton.language as tl

NONE: tl.constexpr = tl.constexpr(0)
TENSOR: tl.constexpr = tl.constexpr(1)
GROUP: tl.constexpr = tl.constexpr(2)

# A storage is a constexpr tuple: (mantissa bits dropped, shift, bits of a code, bits of the largest value, signed,
# scaling, root). `packed` of the launcher makes it.


@triton.jit
def as_bits(x):
    """FP32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """int32 as FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_off(bits, DROPPED: tl.constexpr, random):
    """Non-negative int32 without their last bits. random: 16 bits, or None for to nearest, ties to even."""
    if DROPPED == 0:
        kept = bits
    elif random is None:
        kept = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    elif DROPPED > 16:
        kept = (bits + (random << (DROPPED - 16)) + (1 << (DROPPED - 17))) >> DROPPED
    elif DROPPED == 16:
        kept = (bits + random) >> DROPPED
    else:
        kept = (bits + (random >> (16 - DROPPED))) >> DROPPED
    return kept


@triton.jit
def encode(x, FORMAT: tl.constexpr, random):
    """Codes, int32, of FP32 values within the format's range."""
    SIGN_AT: tl.constexpr = FORMAT[2] - 1
    bits = as_bits(x * FORMAT[1])
    code = round_off(bits & 0x7FFFFFFF, FORMAT[0], random)
    if FORMAT[4]:
        code = code | (((bits >> 31) & 1) << SIGN_AT)
    else:
        code = tl.where((x > 0) & (code == 0), 1, code)
    return code


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """FP32 values of codes, int32."""
    SIGN_AT: tl.constexpr = FORMAT[2] - 1
    if FORMAT[4]:
        bits = ((code & ((1 << SIGN_AT) - 1)) << FORMAT[0]) | ((code >> SIGN_AT) << 31)
    else:
        bits = code << FORMAT[0]
    return as_float(bits) * (1.0 / FORMAT[1])


@triton.jit
def scale_code(amax, LIMIT: tl.constexpr):
    """E8M0 codes, int32, of the smallest powers of two with amax <= scale * max. LIMIT: the bits of max."""
    bits = as_bits(amax)
    more = ((bits & 0x7FFFFF) > (LIMIT & 0x7FFFFF)).to(tl.int32)
    exponent = (bits >> 23) - (LIMIT >> 23) + 127 + more
    return tl.minimum(tl.maximum(exponent, 1), 253)


@triton.jit
def scale_of(code):
    """The FP32 scale of an E8M0 code."""
    return as_float(code << 23)


@triton.jit
def inverse_of(code):
    """What values are multiplied by."""
    return as_float((254 - code) << 23)


@triton.jit
def load_bits(address, index, there, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Codes of one or two bytes as non-negative int32, 0 where there are none."""
    if BYTES == 1:
        bits = tl.load(_pointer(address, tl.uint8, ALIGNED) + index, mask=there, other=0).to(tl.int32)
    else:
        bits = tl.load(_pointer(address, tl.uint16, ALIGNED) + index, mask=there, other=0).to(tl.int32)
    return bits


@triton.jit
def store_bits(bits, address, index, there, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """The low bytes of int32 codes."""
    if BYTES == 1:
        tl.store(_pointer(address, tl.uint8, ALIGNED) + index, (bits & 0xFF).to(tl.uint8), mask=there)
    else:
        tl.store(_pointer(address, tl.uint16, ALIGNED) + index, (bits & 0xFFFF).to(tl.uint16), mask=there)


@triton.jit
def load_float(address, index, there, ALIGNED: tl.constexpr):
    """FP32 values, 0 where there are none."""
    return tl.load(_pointer(address, tl.float32, ALIGNED) + index, mask=there, other=0.0)


@triton.jit
def store_float(x, address, index, there, ALIGNED: tl.constexpr):
    """FP32 values."""
    tl.store(_pointer(address, tl.float32, ALIGNED) + index, x, mask=there)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer
