"""Quads: four adjacent values per thread, so that a warp holds a group of 128, one quad per lane.

One word holds the codes of a quad, one Philox counter gives its random bits, and one warp reduction the maximum of a
group. Kernels hold the values of quads as four tensors (TILE, 32), one per position in the quad. Unless WHOLE (rows
are whole groups and tensors 16-byte aligned), values are loaded and stored one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.storage.triton import DROPPED_E4M3, as_bits, decode
from octavo.kernels.triton.codes import INTERPRETED


@triton.jit
def quads_at(row, column, rows, across, cols, WHOLE: tl.constexpr):
    """Position of the groups at (row, column), int32 (TILE) each, in a matrix of (rows, across) groups and cols values.

    Returns `at` of `fetch` and `store`: the groups' indices and mask (TILE), the quads' indices, int32 (TILE, 32), and
    the masks of their four values. Unless WHOLE, the quads' indices are those of their first values, int64.
    """
    group = row * across + column
    group_mask = (row < rows) & (column < across)
    valid = group_mask[:, None]
    lane = tl.arange(0, 32)[None, :]
    if WHOLE:
        index = group[:, None] * 32 + lane
        masks = (valid, valid, valid, valid)
    else:
        offset = column[:, None] * 128 + lane * 4
        index = row.to(tl.int64)[:, None] * cols + offset
        masks = (
            valid & (offset < cols),
            valid & (offset + 1 < cols),
            valid & (offset + 2 < cols),
            valid & (offset + 3 < cols),
        )
    return group, group_mask, index, masks


@triton.jit
def fetch(address, at, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Load raw words for `tops` and `decoded`; 0 outside the matrix.

    Separate from decoding, so that many loads can be in flight.
    """
    group, group_mask, index, masks = at
    if WHOLE and BYTES == 4:
        offsets, mask = _whole(group, group_mask)
        words = tl.load(_aligned(address) + offsets, mask=mask, other=0.0)
    elif WHOLE and BYTES == 2:
        words = tl.load(_pointer(address, tl.int64) + index, mask=masks[0], other=0)
    elif WHOLE:
        words = tl.load(_pointer(address, tl.int32) + index, mask=masks[0], other=0)
    else:
        words = (
            _load_one(address, index, masks[0], BYTES),
            _load_one(address, index + 1, masks[1], BYTES),
            _load_one(address, index + 2, masks[2], BYTES),
            _load_one(address, index + 3, masks[3], BYTES),
        )
    return words


@triton.jit
def tops(words, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Unpack raw words into four tensors (TILE, 32): codes in the top bits of int32, or FP32 values of 4 bytes."""
    if WHOLE and BYTES == 4:
        values = _split(words)
    elif WHOLE and BYTES == 2:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        values = (low << 16, low, high << 16, high)
    elif WHOLE:
        values = (words << 24, words << 16, words << 8, words)
    else:
        values = words
    return values


@triton.jit
def decoded(words, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Decode raw words to FP32, as four tensors."""
    if WHOLE and FORMAT[0] == DROPPED_E4M3 and not INTERPRETED:
        values = tl.inline_asm_elementwise(FROM_FOUR_E4M3, "=f,=f,=f,=f,r", [words], (tl.float32,) * 4, True, 1)
    else:
        values = tops(words, FORMAT[2] // 8, WHOLE)
        if FORMAT[2] != 32:
            a, b, c, d = values
            values = (decode(a, FORMAT), decode(b, FORMAT), decode(c, FORMAT), decode(d, FORMAT))
    return values


FROM_FOUR_E4M3: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 ab, cd;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 ab, low;
    cvt.rn.f16x2.e4m3x2 cd, high;
    mov.b32 {a, b}, ab;
    mov.b32 {c, d}, cd;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}""")


@triton.jit
def store(values, address, at, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Store four tensors as `tops` returns them; bits below the codes are ignored."""
    group, group_mask, index, masks = at
    if WHOLE and BYTES == 4:
        offsets, mask = _whole(group, group_mask)
        tl.store(_aligned(address) + offsets, _join(values), mask=mask)
    elif WHOLE and BYTES == 2:
        low, high = _halves(values[0], values[1]), _halves(values[2], values[3])
        word = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        tl.store(_pointer(address, tl.int64) + index, word, mask=masks[0])
    elif WHOLE:
        tl.store(_pointer(address, tl.int32) + index, _bytes(values), mask=masks[0])
    else:
        for i in tl.static_range(4):
            _store_one(values[i], address, index + i, masks[i], BYTES)


@triton.jit
def largest(values):
    """Bits of the largest magnitude per group, int32 (TILE); see `largest_of_quads`."""
    return tl.max(largest_of_quads(values), axis=1)


@triton.jit
def largest_of_quads(values):
    """Bits of the largest magnitude per quad, int32 (TILE, 32), ignoring NaN; 0 for four of them."""
    a, b, c, d = _magnitude(values[0]), _magnitude(values[1]), _magnitude(values[2]), _magnitude(values[3])
    found = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    return as_bits(tl.maximum(found, 0.0))  # four NaN give NaN, whose bits are the largest


@triton.jit
def raise_to(address, found):
    """Atomic max of a result of `largest_of_quads` into memory, skipped, as in most programs, if it changes nothing."""
    maximum = tl.max(tl.max(found, axis=1), axis=0)
    if maximum > tl.load(address, cache_modifier=".cg"):
        tl.atomic_max(address, maximum, sem="relaxed")


@triton.jit
def _magnitude(x):
    magnitude = tl.abs(x)
    if INTERPRETED:  # whose maximum propagates NaN
        magnitude = tl.where(x == x, magnitude, 0.0)
    return magnitude


@triton.jit
def load_bytes(address, at):
    """Load one byte per group, int32 (TILE, 1)."""
    group, group_mask, _, _ = at
    byte_ptr = address.to(tl.pointer_type(tl.uint8)) + group
    return tl.load(byte_ptr, mask=group_mask, other=0).to(tl.int32)[:, None]


@triton.jit
def store_bytes(code, address, at):
    """Store one byte per group, of int32 (TILE, 1), by the first lane of its warp: no synchronisation across warps."""
    group, group_mask, _, _ = at
    lane = tl.arange(0, 32)[None, :]
    # Adding the lane, 0 wherever a byte is stored, gives the pointers the layout of the quads: a warp per group.
    byte_ptr = address.to(tl.pointer_type(tl.uint8)) + (group[:, None] + lane)
    tl.store(byte_ptr, code.to(tl.uint8), mask=group_mask[:, None] & (lane == 0))


@triton.jit
def words(seed, group, number, step):
    """32 random bits per value, uint32 (TILE, 32) each: Philox-4x32-10 of counter (quad, number, step, 0)."""
    counter = (group[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.uint32)
    zero = counter * 0
    return tl.philox(seed, counter, zero + number.to(tl.uint32), zero + step.to(tl.uint32), zero)


@triton.jit
def _halves(a, b):
    """Pack the top halves of two, the first in the low half."""
    if INTERPRETED:
        word = ((a >> 16) & 0xFFFF) | (b & -65536)
    else:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1)
    return word


@triton.jit
def _bytes(values):
    """Pack the top bytes of four, the first lowest."""
    if INTERPRETED:
        low = ((values[0] >> 24) & 0xFF) | ((values[1] >> 16) & 0xFF00)
        word = low | ((values[2] >> 8) & 0xFF0000) | (values[3] & -16777216)
    else:
        word = tl.inline_asm_elementwise(BYTES, "=r,r,r,r,r", values, tl.int32, True, 1)
    return word


BYTES: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high;
    prmt.b32 low, $1, $2, 0x73;
    prmt.b32 high, $3, $4, 0x73;
    prmt.b32 $0, low, high, 0x5410;
}""")


@triton.jit
def _whole(group, group_mask):
    """Index and mask of all values of whole groups, (TILE, 128)."""
    lane = tl.arange(0, 128)[None, :]
    return group.to(tl.int64)[:, None] * 128 + lane, group_mask[:, None]


@triton.jit
def _split(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 32, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _join(values):
    pairs = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    return tl.reshape(pairs, (values[0].shape[0], 128))


@triton.jit
def _load_one(address, index, mask, BYTES: tl.constexpr):
    if BYTES == 4:
        x = tl.load(_pointer(address, tl.float32) + index, mask=mask, other=0.0)
    elif BYTES == 2:
        x = tl.load(_pointer(address, tl.uint16) + index, mask=mask, other=0).to(tl.int32) << 16
    else:
        x = tl.load(_pointer(address, tl.uint8) + index, mask=mask, other=0).to(tl.int32) << 24
    return x


@triton.jit
def _store_one(x, address, index, mask, BYTES: tl.constexpr):
    if BYTES == 4:
        tl.store(_pointer(address, tl.float32) + index, x, mask=mask)
    elif BYTES == 2:
        tl.store(_pointer(address, tl.uint16) + index, ((x >> 16) & 0xFFFF).to(tl.uint16), mask=mask)
    else:
        tl.store(_pointer(address, tl.uint8) + index, ((x >> 24) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def _aligned(address):
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)
