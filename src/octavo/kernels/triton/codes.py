"""Device functions that every kernel shares: amax, scale and codes, as `numerics` defines them, bit for bit.

A target's scales are found in one of two ways. Where a tile of scales fits in the tile a program works on (`1x128`,
`128x1`, `128x128`), the program takes the maximum itself. Where it does not (`tensor`, `row`, `column`), an earlier
pass has left the maximum in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter truncates mantissas when it casts to FP8, and has neither -0 nor NaN right."""
NONE: tl.constexpr = tl.constexpr(0)
"""Nothing is written."""
TENSOR: tl.constexpr = tl.constexpr(1)
"""One scale, its amax in memory."""
ROW: tl.constexpr = tl.constexpr(2)
"""A scale a row of the tile, its amax in memory."""
COLUMN: tl.constexpr = tl.constexpr(3)
"""A scale a column of the tile, its amax in memory."""
ROW_TILE: tl.constexpr = tl.constexpr(4)
"""1x128: a scale a row of the tile, of the tile's own maximum."""
COLUMN_TILE: tl.constexpr = tl.constexpr(5)
"""128x1: a scale a column of the tile, of the tile's own maximum."""
BLOCK: tl.constexpr = tl.constexpr(6)
"""128x128: one scale, of the tile's own maximum."""

_MODES = {"tensor": TENSOR, "row": ROW, "column": COLUMN, "1x128": ROW_TILE, "128x1": COLUMN_TILE, "128x128": BLOCK}


def mode_of(granularity: str) -> int | None:
    """Return the mode of a granularity, as the untransposed matrix has it, or None where no kernel has it."""
    mode = _MODES.get(granularity)
    return None if mode is None else mode.value


@triton.jit
def finite_magnitude(x):
    """|x|, with 0 for NaN and infinities, which decide no scale. x: FP32."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def format_max(FORMAT: tl.constexpr):
    """The largest finite value of a format."""
    return 448.0 if FORMAT == tl.float8e4nv else 57344.0


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(scale, inverse) of FP32 maxima, any shape: `numerics.scale_from_amax`."""
    if POWER_OF_TWO:
        bits = amax.to(tl.int32, bitcast=True)
        # 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15: both have the mantissa 0x600000.
        MAX_EXPONENT: tl.constexpr = 135 if FORMAT == tl.float8e4nv else 142
        exponent = (bits >> 23) - MAX_EXPONENT + 127 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.maximum(exponent, 1)
        exponent = tl.where(bits == 0, 127, exponent)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        largest = tl.full(amax.shape, format_max(FORMAT), tl.float64)
        exact = tl.where(amax == 0.0, largest, amax.to(tl.float64))
        scale = tl.maximum((exact / largest).to(tl.float32), 1.1754943508222875e-38)
        inverse = tl.minimum((largest / exact).to(tl.float32), 8.507059173023462e37)
    return scale, inverse


@triton.jit
def _round_in_integers(x, FORMAT: tl.constexpr):
    """The cast that hardware does in one instruction, for the interpreter. x: FP32, within the format's range."""
    DROPPED: tl.constexpr = 20 if FORMAT == tl.float8e4nv else 21  # of FP32's 23 mantissa bits
    BIAS: tl.constexpr = 7 if FORMAT == tl.float8e4nv else 15
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << (23 - DROPPED))
    # Among the subnormals the grid is even: adding a number whose last bit is worth one step rounds to it.
    shift = 1.5 * 2.0 ** (1 - BIAS + DROPPED)
    subnormal = ((tl.abs(x) + shift).to(tl.int32, bitcast=True)) & 0x3FFFFF
    code = tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def to_codes(x, FORMAT: tl.constexpr):
    """Codes of FP32 values: nearest, finite values saturate, NaN and infinities become NaN."""
    LARGEST: tl.constexpr = 448.0 if FORMAT == tl.float8e4nv else 57344.0
    clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    clamped = tl.where(tl.abs(x) < float("inf"), clamped, float("nan"))
    if INTERPRETED:
        codes = _round_in_integers(clamped, FORMAT)
    else:
        codes = clamped.to(FORMAT)
    return codes


@triton.jit
def tile_amax(x, amax_ptr, rows, cols, in_rows, in_cols, MODE: tl.constexpr):
    """The amax that decides the scale of each element of a tile (R, C): shape (R, 1), (1, C) or (1, 1).

    x: FP32, 0 outside the matrix. amax_ptr: the maxima of an earlier pass, (1), (rows) or (columns).
    """
    if MODE == TENSOR:
        amax = tl.load(amax_ptr + tl.zeros((1, 1), tl.int32))
    elif MODE == ROW:
        amax = tl.load(amax_ptr + rows[:, None], mask=in_rows[:, None], other=0.0)
    elif MODE == COLUMN:
        amax = tl.load(amax_ptr + cols[None, :], mask=in_cols[None, :], other=0.0)
    elif MODE == ROW_TILE:
        amax = tl.max(finite_magnitude(x), axis=1)[:, None]
    elif MODE == COLUMN_TILE:
        amax = tl.max(finite_magnitude(x), axis=0)[None, :]
    else:
        amax = tl.max(tl.max(finite_magnitude(x), axis=1)[:, None], axis=0)[None, :]
    return amax


@triton.jit
def search(magnitude, running, amax_ptr, rows, in_rows, MODE: tl.constexpr):
    """One step of a search for maxima down a strip: row maxima go to memory, all else stays in `running`.

    magnitude: (R, C), finite. running: what the last step returned, zeros at first. amax_ptr: zeros at first.
    """
    if MODE == ROW:
        amax = tl.max(magnitude, axis=1)
        where = amax_ptr.to(tl.pointer_type(tl.int32)) + rows  # non-negative FP32 values are ordered as their bits are
        tl.atomic_max(where, amax.to(tl.int32, bitcast=True), mask=in_rows, sem="relaxed")
    else:
        running = tl.maximum(running, magnitude)
    return running


@triton.jit
def end_search(running, amax_ptr, cols, in_cols, MODE: tl.constexpr):
    """Enter what a strip's search has kept."""
    where = amax_ptr.to(tl.pointer_type(tl.int32))
    if MODE == COLUMN:
        amax = tl.max(running, axis=0)
        tl.atomic_max(where + cols, amax.to(tl.int32, bitcast=True), mask=in_cols, sem="relaxed")
    elif MODE == TENSOR:
        amax = tl.max(tl.max(running, axis=1), axis=0)
        tl.atomic_max(where, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def store_scale(
    scale, scale_ptr, stride_r, stride_c, rows, cols, in_rows, in_cols, tile_r, tile_c, MODE: tl.constexpr
):
    """Write the scales of a tile, each once: by the first tile of its row or column where several share them.

    stride_r, stride_c: of the scales as the untransposed matrix has them. tile_r, tile_c: which tile this is.
    """
    if MODE == TENSOR:
        tl.store(scale_ptr + tl.zeros((1, 1), tl.int32), scale, mask=(tile_r == 0) & (tile_c == 0))
    elif MODE == ROW:
        tl.store(scale_ptr + rows[:, None] * stride_r, scale, mask=in_rows[:, None] & (tile_c == 0))
    elif MODE == COLUMN:
        tl.store(scale_ptr + cols[None, :] * stride_c, scale, mask=in_cols[None, :] & (tile_r == 0))
    elif MODE == ROW_TILE:
        tl.store(scale_ptr + rows[:, None] * stride_r + tile_c * stride_c, scale, mask=in_rows[:, None])
    elif MODE == COLUMN_TILE:
        tl.store(scale_ptr + tile_r * stride_r + cols[None, :] * stride_c, scale, mask=in_cols[None, :])
    else:
        tl.store(scale_ptr + tile_r * stride_r + tile_c * stride_c + tl.zeros((1, 1), tl.int32), scale)


@triton.jit
def emit(
    x, codes_ptr, total_r, total_c, scale_ptr, stride_r, stride_c, amax_ptr, rows, cols, in_rows, in_cols,
    tile_r, tile_c, MODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of a (total_r, total_c) matrix and write its codes and scales, transposed or not.

    x: FP32 (R, C), 0 outside the matrix.
    """
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    amax = tile_amax(x, amax_ptr, rows, cols, in_rows, in_cols, MODE)
    scale, inverse = scale_of(amax, FORMAT, POWER_OF_TWO)
    store_scale(scale, scale_ptr, stride_r, stride_c, rows, cols, in_rows, in_cols, tile_r, tile_c, MODE)
    scaled = x * inverse
    if TRANSPOSED:  # in FP32, then cast: Triton has transposed FP8 tiles wrongly in some versions
        where = codes_ptr + cols[:, None].to(tl.int64) * total_r + rows[None, :]
        tl.store(where, to_codes(tl.trans(scaled), FORMAT), mask=in_cols[:, None] & in_rows[None, :])
    else:
        where = codes_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :]
        tl.store(where, to_codes(scaled, FORMAT), mask=in_rows[:, None] & in_cols[None, :])
