"""Device functions that every kernel shares: amax, scale and codes, as `numerics` defines them, bit for bit.

A target's scales are found in one of two ways. Those of `1x128` lie in the tile that a program writes: it takes the
maxima itself. For all others an earlier pass has searched the matrix, in strips as high as a tile of scales, and left
what values are to be multiplied by in memory.

Under a power cap kernels like these are bound by instructions as much as by memory: hence indices without masks where
tiles come out even, and scales that are computed once and not in every program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.telemetry import count_quarters

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter truncates mantissas when it casts to FP8, and has neither -0 nor NaN right."""
NONE: tl.constexpr = tl.constexpr(0)
"""Nothing is written."""
TENSOR: tl.constexpr = tl.constexpr(1)
"""One scale, its inverse in memory."""
ROW: tl.constexpr = tl.constexpr(2)
"""A scale a row of the tile, its inverse in memory."""
COLUMN: tl.constexpr = tl.constexpr(3)
"""A scale a column of the tile, its inverse in memory."""
ROW_TILE: tl.constexpr = tl.constexpr(4)
"""1x128: a scale a row of the tile, of the tile's own maximum."""
COLUMN_TILE: tl.constexpr = tl.constexpr(5)
"""128x1: a scale a column, its inverse in memory."""
BLOCK: tl.constexpr = tl.constexpr(6)
"""128x128: one scale, its inverse in memory."""

SIDE: tl.constexpr = tl.constexpr(128)
"""Rows and columns of those tiles."""

_MODES = {"tensor": TENSOR, "row": ROW, "column": COLUMN, "1x128": ROW_TILE, "128x1": COLUMN_TILE, "128x128": BLOCK}


def mode_of(granularity: str) -> int | None:
    """Return the mode of a granularity, as the untransposed matrix has it, or None where no kernel has it."""
    mode = _MODES.get(granularity)
    return None if mode is None else mode.value


@triton.jit
def finite_magnitude(x):
    """|x| for maxima, which a NaN or an infinity must not decide: 0 or NaN for those. x: FP32.

    `tl.maximum` leaves out a NaN. Take `amax` for whole tiles: a maximum of nothing but NaN is one.
    """
    if INTERPRETED:  # its maximum is numpy's, which hands NaN on
        magnitude = tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    else:
        magnitude = tl.abs(tl.fma(x, 0.0, x))  # infinity times 0 is NaN: one instruction for two
    return magnitude


@triton.jit
def amax(x, axis: tl.constexpr):
    """The largest finite magnitude along an axis of an FP32 tile."""
    return tl.maximum(tl.max(finite_magnitude(x), axis=axis), 0.0)


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
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        largest = tl.full(amax.shape, format_max(FORMAT), tl.float64)
        exact = amax.to(tl.float64)
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
    if INTERPRETED:
        LARGEST: tl.constexpr = 448.0 if FORMAT == tl.float8e4nv else 57344.0
        clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        codes = _round_in_integers(tl.where(tl.abs(x) < float("inf"), clamped, float("nan")), FORMAT)
    else:
        codes = tl.fma(x, 0.0, x).to(FORMAT)  # infinity becomes NaN; the cast itself saturates what is finite
    return codes


@triton.jit
def _pack(y, FORMAT: tl.constexpr):
    """The codes of four FP32 tiles, byte j of each word from tile j."""
    if INTERPRETED:
        packed = to_codes(y[0], FORMAT).to(tl.uint8, bitcast=True).to(tl.uint32)
        packed |= to_codes(y[1], FORMAT).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        packed |= to_codes(y[2], FORMAT).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        packed |= to_codes(y[3], FORMAT).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    else:
        E4M3: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 "
        CAST: tl.constexpr = E4M3 if FORMAT == tl.float8e4nv else "cvt.rn.satfinite.e5m2x2.f32 "
        finite = [tl.fma(y[0], 0.0, y[0]), tl.fma(y[1], 0.0, y[1]), tl.fma(y[2], 0.0, y[2]), tl.fma(y[3], 0.0, y[3])]
        packed = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; " + CAST + "lo, $2, $1; " + CAST + "hi, $4, $3; mov.b32 $0, {lo, hi}; }",
            "=r,r,r,r,r", finite, dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return packed


@triton.jit
def inside(index, total, EVEN: tl.constexpr):
    """Which indices lie in the matrix: all, known when the kernel is compiled, where tiles come out EVEN."""
    if EVEN:
        result = tl.full(index.shape, True, tl.int1)
    else:
        result = index < total
    return result


@triton.jit
def quads(tile_r, total_r, HEIGHT: tl.constexpr, EVEN: tl.constexpr):
    """The rows of a tile of HEIGHT rows by fours: four vectors of indices, and four of whether they are in the matrix.

    A tile is worked on as four of a quarter its height, whose rows alternate: so four codes that stand one under the
    other, side by side in the transpose, are in one thread, which writes them as one word.
    """
    first = tile_r * HEIGHT + 4 * tl.arange(0, HEIGHT // 4)
    r0, r1, r2, r3 = first, first + 1, first + 2, first + 3
    found = (inside(r0, total_r, EVEN), inside(r1, total_r, EVEN), inside(r2, total_r, EVEN), inside(r3, total_r, EVEN))
    return (r0, r1, r2, r3), found


@triton.jit
def load_tile(x_ptr, stride, rows, cols, in_rows, in_cols):
    """A tile of a matrix in FP32, 0 outside it."""
    where = x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(where, mask=in_rows[:, None] & in_cols[None, :], other=0.0).to(tl.float32)


@triton.jit
def factors(fold_ptr, where, inside):
    """The factors of a fold, FP32, 1 where there is none."""
    if fold_ptr is not None:
        factor = tl.load(fold_ptr + where, mask=inside, other=1.0)
    else:
        factor = tl.full(where.shape, 1.0, tl.float32)
    return factor


@triton.jit
def scales_kernel(amax_ptr, scale_ptr, count, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, SIZE: tl.constexpr):
    """End a search: write the scales, and put in the place of each amax what values are multiplied by."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = index < count
    scale, inverse = scale_of(tl.load(amax_ptr + index, mask=there, other=0.0), FORMAT, POWER_OF_TWO)
    tl.store(scale_ptr + index, scale, mask=there)
    tl.store(amax_ptr + index, inverse, mask=there)


@triton.jit
def search(magnitude, running, amax_ptr, rows, in_rows, MODE: tl.constexpr):
    """One step of a search for maxima down a strip: row maxima go to memory, all else stays in `running`.

    magnitude: (R, C), finite. running: what the last step returned, zeros at first. amax_ptr: zeros at first.
    """
    if MODE == ROW:
        largest = tl.maximum(tl.max(magnitude, axis=1), 0.0)
        where = amax_ptr.to(tl.pointer_type(tl.int32)) + rows  # non-negative FP32 values are ordered as their bits are
        tl.atomic_max(where, largest.to(tl.int32, bitcast=True), mask=in_rows, sem="relaxed")
    else:
        running = tl.maximum(running, magnitude)
    return running


@triton.jit
def end_search(running, amax_ptr, stride_r, stride_c, strip, cols, in_cols, MODE: tl.constexpr):
    """Enter what a strip's search has kept.

    stride_r, stride_c: of the scales, as the untransposed matrix has them. strip: its number.
    """
    where = amax_ptr.to(tl.pointer_type(tl.int32))
    if MODE == COLUMN:
        largest = tl.max(running, axis=0)
        tl.atomic_max(where + cols, largest.to(tl.int32, bitcast=True), mask=in_cols, sem="relaxed")
    elif MODE == TENSOR:
        largest = tl.max(tl.max(running, axis=1), axis=0)
        tl.atomic_max(where, largest.to(tl.int32, bitcast=True), sem="relaxed")
    elif MODE == COLUMN_TILE:
        tl.store(amax_ptr + strip * stride_r + cols * stride_c, tl.max(running, axis=0), mask=in_cols)
    elif MODE == BLOCK:
        TILES: tl.constexpr = running.shape[1] // SIDE
        largest = tl.max(tl.reshape(tl.max(running, axis=0), (TILES, SIDE)), axis=1)
        tiles = tl.max(tl.reshape(cols, (TILES, SIDE)), axis=1) // SIDE
        there = tl.max(tl.reshape(in_cols.to(tl.int32), (TILES, SIDE)), axis=1) > 0
        tl.store(amax_ptr + strip * stride_r + tiles * stride_c, largest, mask=there)


@triton.jit
def _row_inverse(
    x, scale_ptr, stride_r, stride_c, inverse_ptr, rows, in_rows, tile_c,
    MODE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """What to multiply the rows of one quarter by, (R, 1); scales of the tile's own are written."""
    if MODE == ROW:
        inverse = tl.load(inverse_ptr + rows[:, None], mask=in_rows[:, None], other=0.0)
    else:
        scale, inverse = scale_of(amax(x, 1)[:, None], FORMAT, POWER_OF_TWO)
        tl.store(scale_ptr + rows[:, None] * stride_r + tile_c * stride_c, scale, mask=in_rows[:, None])
    return inverse


@triton.jit
def _common_inverse(inverse_ptr, stride_r, stride_c, cols, in_cols, tile_r, MODE: tl.constexpr):
    """What to multiply all four quarters by, (1, C) or (1, 1). tile_r: which tile of scales this is."""
    if MODE == TENSOR:
        inverse = tl.load(inverse_ptr + tl.zeros((1, 1), tl.int32))
    elif MODE == COLUMN:
        inverse = tl.load(inverse_ptr + cols[None, :], mask=in_cols[None, :], other=0.0)
    elif MODE == COLUMN_TILE:
        where = inverse_ptr + tile_r * stride_r + cols[None, :] * stride_c
        inverse = tl.load(where, mask=in_cols[None, :], other=0.0)
    else:
        where = inverse_ptr + tile_r * stride_r + cols[None, :] // SIDE * stride_c
        inverse = tl.load(where, mask=in_cols[None, :], other=0.0)
    return inverse


@triton.jit
def store_words(words, codes_ptr, total_r, cols, in_cols, in_rows, tile_r):
    """Write a packed tile (R / 4, C) into the transpose of a matrix of total_r rows, rounded up to a multiple of 4.

    in_rows: (R / 4), whether the first row of each word is in the matrix.

    Words are transposed, never tiles of bytes: Triton has done that wrongly in some versions, for FP8 and for uint8.
    """
    QUARTER: tl.constexpr = words.shape[0]
    pitch = tl.cdiv(total_r, 4)
    down = tile_r * QUARTER + tl.arange(0, QUARTER)
    where = codes_ptr.to(tl.pointer_type(tl.uint32)) + cols[:, None].to(tl.int64) * pitch + down[None, :]
    tl.store(where, tl.trans(words), mask=in_cols[:, None] & in_rows[None, :])


@triton.jit
def _store_quarter(y, codes_ptr, total_c, rows, cols, in_rows, in_cols, FORMAT: tl.constexpr):
    """Write the codes of one quarter as they lie."""
    where = codes_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :]
    tl.store(where, to_codes(y, FORMAT), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit
def emit(
    x, codes_ptr, total_r, total_c, scale_ptr, stride_r, stride_c, inverse_ptr, rows, cols, in_rows, in_cols,
    tile_r, tile_c, MODE: tl.constexpr, POWER_OF_TWO: tl.constexpr, TRANSPOSED: tl.constexpr, stats_ptr=None,
):  # fmt: skip
    """Quantise a tile of a (total_r, total_c) matrix and write its codes, transposed or not, and scales of its own.

    x: four FP32 quarters of the tile, whose rows are `quads`; 0 outside the matrix.
    inverse_ptr: of an earlier pass, where MODE needs it.
    stride_r, stride_c: of the scales, as the untransposed matrix has them.
    tile_r, tile_c: which tile this is.
    TRANSPOSED: codes_ptr has memory for total_r rounded up to a multiple of 4 (see `store_words`).
    stats_ptr: where to count what is lost (`octavo.kernels.telemetry`), or None.
    """
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    if MODE == ROW or MODE == ROW_TILE:
        i0 = _row_inverse(
            x[0], scale_ptr, stride_r, stride_c, inverse_ptr, rows[0], in_rows[0], tile_c, MODE, FORMAT, POWER_OF_TWO
        )
        i1 = _row_inverse(
            x[1], scale_ptr, stride_r, stride_c, inverse_ptr, rows[1], in_rows[1], tile_c, MODE, FORMAT, POWER_OF_TWO
        )
        i2 = _row_inverse(
            x[2], scale_ptr, stride_r, stride_c, inverse_ptr, rows[2], in_rows[2], tile_c, MODE, FORMAT, POWER_OF_TWO
        )
        i3 = _row_inverse(
            x[3], scale_ptr, stride_r, stride_c, inverse_ptr, rows[3], in_rows[3], tile_c, MODE, FORMAT, POWER_OF_TWO
        )
    else:
        tile_of_scales = tile_r * (4 * x[0].shape[0]) // SIDE
        i0 = _common_inverse(inverse_ptr, stride_r, stride_c, cols, in_cols, tile_of_scales, MODE)
        i1, i2, i3 = i0, i0, i0
    y = (x[0] * i0, x[1] * i1, x[2] * i2, x[3] * i3)
    if stats_ptr is not None:
        count_quarters(x, y, stats_ptr, FORMAT)
    if TRANSPOSED:
        store_words(_pack(y, FORMAT), codes_ptr, total_r, cols, in_cols, in_rows[0], tile_r)
    else:
        _store_quarter(y[0], codes_ptr, total_c, rows[0], cols, in_rows[0], in_cols, FORMAT)
        _store_quarter(y[1], codes_ptr, total_c, rows[1], cols, in_rows[1], in_cols, FORMAT)
        _store_quarter(y[2], codes_ptr, total_c, rows[2], cols, in_rows[2], in_cols, FORMAT)
        _store_quarter(y[3], codes_ptr, total_c, rows[3], cols, in_rows[3], in_cols, FORMAT)
