"""Four values that lie side by side, as a thread has them: a quad. A warp has a group of 128, one value a lane.

One word holds the codes of a quad, one counter of Philox gives its random bits, and the maximum of a group is one
reduction of a warp. Where rows are not whole groups, or a tensor does not begin at 16 bytes, they are read one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.codes import INTERPRETED
from octavo.kernels.triton.storage import DROPPED_E4M3, as_bits, decode


@triton.jit
def quads_at(row, column, rows, across, cols, WHOLE: tl.constexpr):
    """Where the groups of some rows and columns of groups, int32 (TILE), lie, of as many; and cols of values.

    Returns what `load` and `store` take: the numbers of the groups, which of them there are, the index of the quads,
    int32 (TILE, 32), and which of their values there are. Where rows are not whole groups it is the index of their
    first values, int64.
    """
    group = row * across + column
    group_there = (row < rows) & (column < across)
    some = group_there[:, None]
    lane = tl.arange(0, 32)[None, :]
    if WHOLE:
        index = group[:, None] * 32 + lane
        there = (some, some, some, some)
    else:
        inside = column[:, None] * 128 + lane * 4
        index = row.to(tl.int64)[:, None] * cols + inside
        there = (
            some & (inside < cols),
            some & (inside + 1 < cols),
            some & (inside + 2 < cols),
            some & (inside + 3 < cols),
        )
    return group, group_there, index, there


@triton.jit
def fetch(address, at, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Words as they lie in memory, for `tops` and `decoded`; 0 where there are none.

    Apart from what is made of them, so that many may be on their way at once.
    """
    group, group_there, index, there = at
    if WHOLE and BYTES == 4:
        place, inside = _whole(group, group_there)
        words = tl.load(_aligned(address) + place, mask=inside, other=0.0)
    elif WHOLE and BYTES == 2:
        words = tl.load(_pointer(address, tl.int64) + index, mask=there[0], other=0)
    elif WHOLE:
        words = tl.load(_pointer(address, tl.int32) + index, mask=there[0], other=0)
    else:
        words = (
            _load_one(address, index, there[0], BYTES),
            _load_one(address, index + 1, there[1], BYTES),
            _load_one(address, index + 2, there[2], BYTES),
            _load_one(address, index + 3, there[3], BYTES),
        )
    return words


@triton.jit
def tops(words, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Four times codes, in the top bits of int32 (TILE, 32), or FP32 values where they have 4 bytes."""
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
    """Four times the FP32 values of codes."""
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
    """Undo `load`; what lies below codes is ignored."""
    group, group_there, index, there = at
    if WHOLE and BYTES == 4:
        place, inside = _whole(group, group_there)
        tl.store(_aligned(address) + place, _join(values), mask=inside)
    elif WHOLE and BYTES == 2:
        low, high = _halves(values[0], values[1]), _halves(values[2], values[3])
        word = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        tl.store(_pointer(address, tl.int64) + index, word, mask=there[0])
    elif WHOLE:
        tl.store(_pointer(address, tl.int32) + index, _bytes(values), mask=there[0])
    else:
        for i in tl.static_range(4):
            _store_one(values[i], address, index + i, there[i], BYTES)


@triton.jit
def largest(values):
    """The bits of the largest magnitude of each group, int32 (TILE); NaN does not count beside others."""
    return tl.max(largest_of_quads(values), axis=1)


@triton.jit
def largest_of_quads(values):
    """Those of each quad, int32 (TILE, 32)."""
    a, b, c, d = _magnitude(values[0]), _magnitude(values[1]), _magnitude(values[2]), _magnitude(values[3])
    return as_bits(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))


@triton.jit
def raise_to(address, found):
    """Raise a maximum in memory to the largest of `largest_of_quads`: mostly a program has found nothing larger."""
    most = tl.max(tl.max(found, axis=1), axis=0)
    if most > tl.load(address, cache_modifier=".cg"):
        tl.atomic_max(address, most, sem="relaxed")


@triton.jit
def _magnitude(x):
    magnitude = tl.abs(x)
    if INTERPRETED:  # whose maximum of NaN and a number is NaN
        magnitude = tl.where(x == x, magnitude, 0.0)
    return magnitude


@triton.jit
def load_bytes(address, at):
    """A byte a group, int32 (TILE, 1)."""
    group, group_there, _, _ = at
    place = address.to(tl.pointer_type(tl.uint8)) + group
    return tl.load(place, mask=group_there, other=0).to(tl.int32)[:, None]


@triton.jit
def store_bytes(code, address, at):
    """A byte a group, of int32 (TILE, 1): by the first lane of its warp, so that no other warp is waited for."""
    group, group_there, _, _ = at
    lane = tl.arange(0, 32)[None, :]
    # The lane in it is 0, and has Triton lay warps along the lanes as all else does.
    place = address.to(tl.pointer_type(tl.uint8)) + (group[:, None] + lane)
    tl.store(place, code.to(tl.uint8), mask=group_there[:, None] & (lane == 0))


@triton.jit
def words(seed, group, number, step):
    """Four times 32 random bits, uint32 (TILE, 32): Philox-4x32-10 of the counter that is the quad's number."""
    counter = (group[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.uint32)
    zero = counter * 0
    return tl.philox(seed, counter, zero + number.to(tl.uint32), zero + step.to(tl.uint32), zero)


@triton.jit
def _halves(a, b):
    """The top halves of two, the first below."""
    if INTERPRETED:
        word = ((a >> 16) & 0xFFFF) | (b & -65536)
    else:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1)
    return word


@triton.jit
def _bytes(values):
    """The top bytes of four, the first lowest."""
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
def _whole(group, group_there):
    """Index and mask of all values of whole groups, (TILE, 128)."""
    lane = tl.arange(0, 128)[None, :]
    return group.to(tl.int64)[:, None] * 128 + lane, group_there[:, None]


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
def _load_one(address, index, there, BYTES: tl.constexpr):
    if BYTES == 4:
        x = tl.load(_pointer(address, tl.float32) + index, mask=there, other=0.0)
    elif BYTES == 2:
        x = tl.load(_pointer(address, tl.uint16) + index, mask=there, other=0).to(tl.int32) << 16
    else:
        x = tl.load(_pointer(address, tl.uint8) + index, mask=there, other=0).to(tl.int32) << 24
    return x


@triton.jit
def _store_one(x, address, index, there, BYTES: tl.constexpr):
    if BYTES == 4:
        tl.store(_pointer(address, tl.float32) + index, x, mask=there)
    elif BYTES == 2:
        tl.store(_pointer(address, tl.uint16) + index, ((x >> 16) & 0xFFFF).to(tl.uint16), mask=there)
    else:
        tl.store(_pointer(address, tl.uint8) + index, ((x >> 24) & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def _aligned(address):
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16)
