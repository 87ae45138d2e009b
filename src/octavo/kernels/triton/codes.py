"""Device functions shared by all kernels: amax, scale and codes; results equal `numerics` bit for bit.

Scales are found in one of two ways. If a program's tile holds all values of a scale, it reduces them itself: always for
`1x128`, and for the other tiles of 128 if its tile is 128 rows high. Otherwise an earlier pass searches the matrix, in
strips of 128 rows, and leaves the inverse scales in memory.

Under a power cap these kernels are bound by instructions as much as by memory: hence unmasked accesses where tiles
divide the matrix evenly, and scales computed once rather than in every program.
"""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.launch import Kernel

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels: its casts to FP8 truncate, and get -0 and NaN wrong."""
NONE: tl.constexpr = tl.constexpr(0)
"""No output."""
TENSOR: tl.constexpr = tl.constexpr(1)
"""One scale, its inverse in memory."""
ROW: tl.constexpr = tl.constexpr(2)
"""One scale per row of the tile, its inverse in memory."""
COLUMN: tl.constexpr = tl.constexpr(3)
"""One scale per column of the tile, its inverse in memory."""
ROW_TILE: tl.constexpr = tl.constexpr(4)
"""1x128: one scale per row of the tile, from the tile's own maximum."""
COLUMN_TILE: tl.constexpr = tl.constexpr(5)
"""128x1: one scale per column, from the tile's own maximum unless its inverse is in memory."""
BLOCK: tl.constexpr = tl.constexpr(6)
"""128x128: one scale, from the tile's own maximum unless its inverse is in memory."""

FLOAT32: tl.constexpr = tl.constexpr(0)
"""`QuantSpec.rule` of FP32 scales; `numerics.scale_from_amax` defines the rules."""
POWER_OF_TWO: tl.constexpr = tl.constexpr(1)
"""`QuantSpec.rule` of power-of-two scales."""
ENGINE: tl.constexpr = tl.constexpr(2)
"""`QuantSpec.rule` of the scales of inference engines."""

SIDE: tl.constexpr = tl.constexpr(128)
"""Long side of the tiles 1x128, 128x1 and 128x128."""

_MODES = {"tensor": TENSOR, "row": ROW, "column": COLUMN, "1x128": ROW_TILE, "128x1": COLUMN_TILE, "128x128": BLOCK}


def mode_of(granularity: str) -> int | None:
    """Return the mode of a granularity of the untransposed matrix, or None if no kernel supports it."""
    mode = _MODES.get(granularity)
    return None if mode is None else mode.value


@triton.jit
def without_infinities(x):
    """Replace infinities with NaN. x: FP32."""
    if INTERPRETED:
        result = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    else:
        result = tl.fma(x, 0.0, x)  # infinity times 0 is NaN: one instruction instead of two
    return result


@triton.jit
def _magnitude(x):
    """|x| for maxima that ignore NaN: 0 or NaN for NaN. x: FP32, without infinities.

    `tl.maximum` ignores NaN unless both operands are NaN.
    """
    result = tl.abs(x)
    if INTERPRETED:  # its maximum is numpy's, which propagates NaN
        result = tl.where(x == x, result, 0.0)
    return result


@triton.jit
def finite_magnitude(x):
    """|x| for maxima, 0 or NaN for non-finite values. x: FP32. To reduce a tile, use `amax`."""
    return _magnitude(without_infinities(x))


@triton.jit
def largest(x, axis: tl.constexpr):
    """The largest magnitude along an axis of an FP32 tile without infinities."""
    return tl.maximum(tl.max(_magnitude(x), axis=axis), 0.0)


@triton.jit
def amax(x, axis: tl.constexpr):
    """The largest finite magnitude along an axis of an FP32 tile."""
    return largest(without_infinities(x), axis)


@triton.jit
def format_max(FORMAT: tl.constexpr):
    """The largest finite value of a format."""
    return 448.0 if FORMAT == tl.float8e4nv else 127.0 if FORMAT == tl.int8 else 57344.0


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr, SCALING: tl.constexpr):
    """(scale, inverse) of FP32 maxima, any shape: `numerics.scale_from_amax`."""
    if SCALING == POWER_OF_TWO:
        bits = amax.to(tl.int32, bitcast=True)
        # 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15 have the mantissa 0x600000, 127 = 1.984375 * 2^6 has 0x7E0000.
        MAX_EXPONENT: tl.constexpr = 135 if FORMAT == tl.float8e4nv else 133 if FORMAT == tl.int8 else 142
        MAX_MANTISSA: tl.constexpr = 0x7E0000 if FORMAT == tl.int8 else 0x600000
        exponent = (bits >> 23) - MAX_EXPONENT + 127 + ((bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
        exponent = tl.maximum(exponent, 1)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        # A quotient of two FP32 values that is rounded to FP64 first, as the specification has it, rounds to the same
        # FP32 value: 53 bits are more than twice 24 (Figueroa 1995). Double precision takes more instructions.
        largest = tl.full(amax.shape, format_max(FORMAT), tl.float32)
        scale = tl.div_rn(amax, largest)
        if SCALING == ENGINE:
            scale = tl.maximum(scale, 1.0 / (512.0 * format_max(FORMAT)))
            inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
        else:
            scale = tl.maximum(scale, 1.1754943508222875e-38)
            inverse = tl.minimum(tl.div_rn(largest, amax), 8.507059173023462e37)
    return scale, inverse


@triton.jit
def _rotation_stage(x, STRIDE: tl.constexpr):
    """One stage of `numerics.rotate` on groups of four values that are STRIDE apart along the last axis.

    Sums of two are the same in any order: hence two reductions of pairs. Half a sum is exact, so that the fused
    instruction, also of kernels that fuse nothing else, rounds as the specification does. Times -1.0, as a minus is a
    subtraction from 0 in Triton 3.6, an instruction more.
    """
    pairs = tl.reshape(x, (x.numel // (4 * STRIDE), 2, 2, STRIDE))
    total = tl.sum(tl.sum(pairs, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return tl.reshape(tl.fma(tl.broadcast_to(total, pairs.shape), 0.5, pairs * -1.0), x.shape)


@triton.jit
def _sylvester_stage(x, STRIDE: tl.constexpr):
    """Sums and differences of values that are STRIDE apart along the last axis."""
    pairs = tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE))
    first = tl.arange(0, 2)[None, :, None] == 0
    total = tl.sum(pairs, axis=1, keep_dims=True)
    difference = tl.sum(tl.where(first, pairs, -pairs), axis=1, keep_dims=True)
    return tl.reshape(tl.where(first, total, difference), x.shape)


@triton.jit
def _rotate_by_sylvester(x, SIZE: tl.constexpr):
    """Halving after every second stage is exact, fused with the next addition or not; sqrt(1/2) comes last."""
    for STAGE in tl.static_range(0, 10, 2):
        if SIZE >= 4 << STAGE:
            x = _sylvester_stage(x, 1 << STAGE)
            x = _sylvester_stage(x, 2 << STAGE) * 0.5
        elif SIZE == 2 << STAGE:
            x = _sylvester_stage(x, 1 << STAGE) * 0.7071067811865476
    return x


@triton.jit
def rotate(x, BLOCK: tl.constexpr):
    """`numerics.rotate` of FP32 rows, whose padded length is a multiple of BLOCK."""
    if BLOCK < 0:
        x = _rotate_by_sylvester(x, -BLOCK)
    if BLOCK >= 4:
        x = _rotation_stage(x, 1)
    if BLOCK >= 16:
        x = _rotation_stage(x, 4)
    if BLOCK >= 64:
        x = _rotation_stage(x, 16)
    if BLOCK >= 256:
        x = _rotation_stage(x, 64)
    if BLOCK >= 1024:
        x = _rotation_stage(x, 256)
    return x


@triton.jit
def to_integers(x, keep):
    """FP32 values of at most 127.5 to the nearest integer, ties to even, as INT8; 0 unless `keep`, all ones."""
    # Adding 1.5 * 2^23, whose last bit is worth 1, rounds; the sum's low byte is the code. The product before must be
    # rounded by itself: no compiler fuses an addition that names its rounding.
    if INTERPRETED:
        codes = ((x + 12582912.0).to(tl.int32, bitcast=True) & keep).to(tl.int8)
    else:
        codes = tl.inline_asm_elementwise(
            "{ .reg .f32 a, b, c, d; .reg .b32 lo, hi; add.rn.f32 a, $1, 0f4B400000; add.rn.f32 b, $2, 0f4B400000;"
            " add.rn.f32 c, $3, 0f4B400000; add.rn.f32 d, $4, 0f4B400000; prmt.b32 lo, a, b, 0x0040;"
            " prmt.b32 hi, c, d, 0x0040; prmt.b32 lo, lo, hi, 0x5410; and.b32 $0, lo, $5; }",
            "=r,r,r,r,r,r,r,r,r", [x, tl.broadcast_to(keep, x.shape)], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return codes


@triton.jit
def integer_codes(x):
    """INT8 codes of FP32 values, to nearest, ties to even; 0 for what is not finite."""
    # Adding 1.5 * 2^23, whose last bit is worth 1, rounds; the sum's low byte is the code.
    clamped = tl.minimum(tl.maximum(x, -127.0), 127.0)
    rounded = (clamped + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return tl.where(tl.abs(x) < float("inf"), rounded, 0)


@triton.jit
def integer_scale(x, axis: tl.constexpr, SCALING: tl.constexpr):
    """(scale, inverse, keep) of rows along an axis of an FP32 tile, for their INT8 codes, `to_integers(x * inverse)`.

    By its own scale no value of a row exceeds 127.5: nothing to clamp. A row that is not finite is all zeros.
    """
    # NaN and infinities are the largest magnitudes as integers: one reduction finds them and the maximum.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis)
    finite = bits < 0x7F800000
    scale, inverse = scale_of(tl.where(finite, bits, 0).to(tl.float32, bitcast=True), tl.int8, SCALING)
    return tl.where(finite, scale, float("nan")), inverse, tl.where(finite, -1, 0)


@triton.jit
def row_codes(x, FORMAT: tl.constexpr, SCALING: tl.constexpr):
    """(codes, scale) of a row held by a program, FP32, with one scale."""
    if FORMAT == tl.int8:
        scale, inverse, keep = integer_scale(x, 0, SCALING)
        codes = to_integers(x * inverse, keep)
    else:
        x = without_infinities(x)  # scaling adds none
        scale, inverse = scale_of(largest(x, 0), FORMAT, SCALING)
        codes = nearest_codes(x * inverse, FORMAT)
    return codes, scale


@triton.jit
def emit_row(x, codes_ptr, scale_ptr, row, cols, columns, mask, SCALING: tl.constexpr):
    """Quantise a row held by a program with one scale, and store codes and scale."""
    codes, scale = row_codes(x, codes_ptr.dtype.element_ty, SCALING)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * cols + columns, codes, mask=mask)


@triton.jit
def emit_second_scale(x, scale_ptr, row, SCALING: tl.constexpr, E4M3: tl.constexpr):
    """Store the scale of a row held by a program for the second set of codes; nothing without a pointer."""
    if scale_ptr is not None:
        FORMAT: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
        scale, _ = scale_of(amax(x, 0), FORMAT, SCALING)
        tl.store(scale_ptr + row, scale)


@triton.jit
def _round_in_integers(x, FORMAT: tl.constexpr):
    """FP8 cast for the interpreter; hardware has an instruction. x: FP32, within the format's range."""
    DROPPED: tl.constexpr = 20 if FORMAT == tl.float8e4nv else 21  # of FP32's 23 mantissa bits
    BIAS: tl.constexpr = 7 if FORMAT == tl.float8e4nv else 15
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << (23 - DROPPED))
    # Subnormals are evenly spaced: adding a number whose last bit is worth one step rounds to them.
    shift = 1.5 * 2.0 ** (1 - BIAS + DROPPED)
    subnormal = ((tl.abs(x) + shift).to(tl.int32, bitcast=True)) & 0x3FFFFF
    code = tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(FORMAT, bitcast=True)


@triton.jit
def nearest_codes(x, FORMAT: tl.constexpr):
    """Codes of FP32 values without infinities: to nearest, finite values saturate, NaN stays."""
    if INTERPRETED:
        LARGEST: tl.constexpr = 448.0 if FORMAT == tl.float8e4nv else 57344.0
        clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        codes = _round_in_integers(tl.where(x == x, clamped, x), FORMAT)
    else:
        codes = x.to(FORMAT)  # the cast itself saturates
    return codes


@triton.jit
def to_codes(x, FORMAT: tl.constexpr):
    """Codes of FP32 values: to nearest, finite values saturate, NaN and infinities become NaN, or 0 in INT8."""
    if FORMAT == tl.int8:
        codes = integer_codes(x)
    else:
        codes = nearest_codes(without_infinities(x), FORMAT)
    return codes


@triton.jit
def pack(y, FORMAT: tl.constexpr):
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
    """Mask of the indices within the matrix; if EVEN (no partial tiles), all, known at compile time."""
    if EVEN:
        result = tl.full(index.shape, True, tl.int1)
    else:
        result = index < total
    return result


@triton.jit
def quads(tile_r, total_r, HEIGHT: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a tile of HEIGHT rows, interleaved in four quarters: four vectors of indices, and their four masks.

    One thread holds the same element of all quarters: four vertically adjacent codes, which are contiguous in the
    transpose and stored as one word.
    """
    first = tile_r * HEIGHT + 4 * tl.arange(0, HEIGHT // 4)
    r0, r1, r2, r3 = first, first + 1, first + 2, first + 3
    found = (inside(r0, total_r, EVEN), inside(r1, total_r, EVEN), inside(r2, total_r, EVEN), inside(r3, total_r, EVEN))
    return (r0, r1, r2, r3), found


@triton.jit
def load_tile(x_ptr, stride, rows, cols, in_rows, in_cols):
    """Load a tile in FP32, 0 outside the matrix."""
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(x_ptrs, mask=in_rows[:, None] & in_cols[None, :], other=0.0).to(tl.float32)


@triton.jit
def source_rows(source_ptr, rows, mask):
    """Indices of the rows to load: gathered from source_ptr, or the rows themselves without it."""
    if source_ptr is not None:
        rows = tl.load(source_ptr + rows, mask=mask, other=0)
    return rows


@triton.jit
def load_quads(x_ptr, stride, source_ptr, rows, cols, in_rows, in_cols):
    """Load the four quarters of a tile in FP32, 0 outside the matrix. rows, in_rows: from `quads`."""
    x = ()
    for i in tl.static_range(4):
        x += (load_tile(x_ptr, stride, source_rows(source_ptr, rows[i], in_rows[i]), cols, in_rows[i], in_cols),)
    return x


@triton.jit
def load_words(x_ptr, stride, source_ptr, rows, cols, in_rows, in_cols):
    """Load a tile of bytes as words, byte j of each from quarter j."""
    words = 0
    for i in tl.static_range(4):
        x_ptrs = x_ptr + source_rows(source_ptr, rows[i], in_rows[i])[:, None].to(tl.int64) * stride + cols[None, :]
        word = tl.load(x_ptrs, mask=in_rows[i][:, None] & in_cols[None, :], other=0).to(tl.uint32)
        words = word if i == 0 else words | word << (8 * i)
    return words


@triton.jit
def factors(fold_ptr, index, mask):
    """Load the factors of a fold, FP32; 1 without a fold."""
    if fold_ptr is not None:
        factor = tl.load(fold_ptr + index, mask=mask, other=1.0)
    else:
        factor = tl.full(index.shape, 1.0, tl.float32)
    return factor


@triton.jit
def factors_of_quads(fold_ptr, rows, in_rows):
    """Load the factors of the rows of four quarters, (R, 1) each."""
    found = ()
    for i in tl.static_range(4):
        found += (factors(fold_ptr, rows[i], in_rows[i])[:, None],)
    return found


@triton.jit
def times(x, factor):
    """Four quarters of a tile times one factor."""
    return x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor


@triton.jit
def times_each(x, f):
    """Four quarters of a tile, each times its own factor."""
    return x[0] * f[0], x[1] * f[1], x[2] * f[2], x[3] * f[3]


@triton.jit
def _end_search_of(amax_ptr, scale_ptr, count, E4M3: tl.constexpr, SCALING: tl.constexpr, SIZE: tl.constexpr):
    FORMAT: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = index < count
    scale, inverse = scale_of(tl.load(amax_ptr + index, mask=mask, other=0.0), FORMAT, SCALING)
    tl.store(scale_ptr + index, scale, mask=mask)
    tl.store(amax_ptr + index, inverse, mask=mask)


@Kernel
@triton.jit
def scales_kernel(
    amax_ptr, scale_ptr, count, E4M3: tl.constexpr, SCALING: tl.constexpr,
    other_amax_ptr, other_scale_ptr, other_count, OTHER_E4M3: tl.constexpr, OTHER_SCALING: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Finish one or two searches: store the scales, and overwrite each amax with the inverse scale."""
    if other_amax_ptr is None:
        _end_search_of(amax_ptr, scale_ptr, count, E4M3, SCALING, SIZE)
    elif tl.program_id(1) == 0:
        _end_search_of(amax_ptr, scale_ptr, count, E4M3, SCALING, SIZE)
    else:
        _end_search_of(other_amax_ptr, other_scale_ptr, other_count, OTHER_E4M3, OTHER_SCALING, SIZE)


@triton.jit
def search(magnitude, running, amax_ptr, rows, in_rows, MODE: tl.constexpr):
    """One step of a search for maxima down a strip: row maxima go to memory, others accumulate in `running`.

    magnitude: (R, C), finite. running: result of the previous step, initially zeros. amax_ptr: initially zeros.
    """
    if MODE == ROW:
        # Non-negative FP32 values order like their bits, and a warp reduces integers in one instruction.
        parts = tl.max(tl.reshape(magnitude, (magnitude.shape[0], magnitude.shape[1] // 8, 8)), axis=2)
        found = tl.max(tl.maximum(parts, 0.0).to(tl.int32, bitcast=True), axis=1)
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + rows, found, mask=in_rows, sem="relaxed")
    else:
        running = tl.maximum(running, magnitude)
    return running


@triton.jit
def end_search(running, amax_ptr, stride_r, stride_c, strip, cols, in_cols, MODE: tl.constexpr):
    """Write the maxima accumulated over a strip to memory.

    stride_r, stride_c: strides of the scales along rows and columns of the untransposed matrix. strip: its index.
    """
    bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32))
    if MODE == COLUMN:
        found = tl.max(running, axis=0)
        tl.atomic_max(bits_ptr + cols, found.to(tl.int32, bitcast=True), mask=in_cols, sem="relaxed")
    elif MODE == TENSOR:
        found = tl.max(tl.max(running, axis=1), axis=0)
        tl.atomic_max(bits_ptr, found.to(tl.int32, bitcast=True), sem="relaxed")
    elif MODE == COLUMN_TILE:
        tl.store(amax_ptr + strip * stride_r + cols * stride_c, tl.max(running, axis=0), mask=in_cols)
    elif MODE == BLOCK:
        TILES: tl.constexpr = running.shape[1] // SIDE
        found = tl.max(tl.reshape(tl.max(running, axis=0), (TILES, SIDE)), axis=1)
        tiles = tl.max(tl.reshape(cols, (TILES, SIDE)), axis=1) // SIDE
        mask = tl.max(tl.reshape(in_cols.to(tl.int32), (TILES, SIDE)), axis=1) > 0
        tl.store(amax_ptr + strip * stride_r + tiles * stride_c, found, mask=mask)


@triton.jit
def _row_inverse(
    x, out, rows, in_rows, tile_c, MODE: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr,
    FROM_AMAX: tl.constexpr,
):  # fmt: skip
    """Inverse scales of the rows of one quarter, (R, 1). Stores the scales that it computes."""
    _, scale_ptr, stride_r, stride_c, inverse_ptr = out
    if MODE == ROW:
        inverse = tl.load(inverse_ptr + rows[:, None], mask=in_rows[:, None], other=0.0)
        if FROM_AMAX:
            scale, inverse = scale_of(inverse, FORMAT, SCALING)
            tl.store(scale_ptr + rows[:, None], scale, mask=in_rows[:, None] & (tile_c == 0))
    else:
        scale, inverse = scale_of(amax(x, 1)[:, None], FORMAT, SCALING)
        tl.store(scale_ptr + rows[:, None] * stride_r + tile_c * stride_c, scale, mask=in_rows[:, None])
    return inverse


@triton.jit
def _common_inverse(
    out, at, tile_of_scales, MODE: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr, FROM_AMAX: tl.constexpr
):
    """Inverse scales of all four quarters, (1, C) or (1, 1). Stores the scales that it computes."""
    _, scale_ptr, stride_r, stride_c, inverse_ptr = out
    _, cols, _, in_cols, tile_r, _ = at
    if MODE == TENSOR:
        offset = tl.zeros((1, 1), tl.int32)
        mask = offset == 0
    elif MODE == COLUMN:
        offset, mask = cols[None, :], in_cols[None, :]
    elif MODE == COLUMN_TILE:
        offset, mask = tile_of_scales * stride_r + cols[None, :] * stride_c, in_cols[None, :]
    else:
        offset, mask = tile_of_scales * stride_r + cols[None, :] // SIDE * stride_c, in_cols[None, :]
    inverse = tl.load(inverse_ptr + offset, mask=mask, other=0.0)
    if FROM_AMAX:
        scale, inverse = scale_of(inverse, FORMAT, SCALING)
        if MODE == TENSOR or MODE == COLUMN:
            mask = mask & (tile_r == 0)
        tl.store(scale_ptr + offset, scale, mask=mask)
    return inverse


@triton.jit
def _own_inverse(x, out, at, total_r, MODE: tl.constexpr, FORMAT: tl.constexpr, SCALING: tl.constexpr):
    """Inverse scales of a tile of 128 rows from its own maxima, (1, C) or (1, 1). Stores the scales."""
    _, scale_ptr, stride_r, stride_c, _ = out
    _, cols, _, in_cols, tile_r, tile_c = at
    tl.static_assert(4 * x[0].shape[0] == SIDE)
    upper = tl.maximum(finite_magnitude(x[0]), finite_magnitude(x[1]))
    lower = tl.maximum(finite_magnitude(x[2]), finite_magnitude(x[3]))
    found = tl.maximum(tl.max(tl.maximum(upper, lower), axis=0), 0.0)[None, :]
    if MODE == COLUMN_TILE:
        scale, inverse = scale_of(found, FORMAT, SCALING)
        scale_ptrs = scale_ptr + tile_r * stride_r + cols[None, :] * stride_c
        tl.store(scale_ptrs, scale, mask=in_cols[None, :] & (tile_r * SIDE < total_r))
    else:
        tl.static_assert(MODE == BLOCK and x[0].shape[1] == SIDE)
        scale, inverse = scale_of(tl.max(found, axis=1)[:, None], FORMAT, SCALING)
        scale_ptrs = scale_ptr + tl.zeros((1, 1), tl.int32) + tile_r * stride_r + tile_c * stride_c
        tl.store(scale_ptrs, scale, mask=tl.full((1, 1), tile_r * SIDE, tl.int32) < total_r)
    return inverse


@triton.jit
def store_words(words, codes_ptr, total_r, cols, in_cols, in_rows, tile_r, EVEN: tl.constexpr = False):
    """Store a packed tile (R / 4, C) into the transpose of a matrix of total_r rows, padded to a multiple of 4.

    in_rows: (R / 4), mask of the first row of each word. EVEN: total_r is a multiple of the tile's height.

    Words are transposed, never bytes: some versions of Triton transpose tiles of FP8 and uint8 wrongly.
    """
    QUARTER: tl.constexpr = words.shape[0]
    if EVEN:
        pitch = tl.multiple_of(tl.full((), total_r // 4, tl.int32), QUARTER)  # stores of several words
    else:
        pitch = tl.cdiv(total_r, 4)
    down = tile_r * QUARTER + tl.arange(0, QUARTER)
    codes_ptrs = codes_ptr.to(tl.pointer_type(tl.uint32)) + cols[:, None].to(tl.int64) * pitch + down[None, :]
    tl.store(codes_ptrs, tl.trans(words), mask=in_cols[:, None] & in_rows[None, :])


@triton.jit
def emit(
    x, out, size, at, MODE: tl.constexpr, SCALING: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr = False, FROM_AMAX: tl.constexpr = False,
):  # fmt: skip
    """Quantise a tile and store its codes, transposed or not, and the scales computed here.

    x: four FP32 quarters of the tile, with the rows of `quads`; 0 outside the matrix.
    out: codes; scales and their strides along rows and columns of the untransposed matrix; inverse scales of an earlier
        pass, if MODE needs one, or None to reduce the tile itself.
    size: rows and columns of the matrix.
    at: row and column indices of the tile, their masks, and the tile's own row and column index.
    TRANSPOSED: the output is padded to a multiple of 4 rows of the matrix (see `store_words`).
    EVEN: the rows of the matrix are a multiple of the tile's height.
    FROM_AMAX: the earlier pass left maxima, from which scales are computed here.
    """
    codes_ptr, inverse_ptr = out[0], out[4]
    rows, cols, in_rows, in_cols, tile_r, tile_c = at
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    if MODE == ROW or MODE == ROW_TILE:
        inverses = ()
        for i in tl.static_range(4):
            inverses += (_row_inverse(x[i], out, rows[i], in_rows[i], tile_c, MODE, FORMAT, SCALING, FROM_AMAX),)
        y = times_each(x, inverses)
    elif inverse_ptr is None:
        y = times(x, _own_inverse(x, out, at, size[0], MODE, FORMAT, SCALING))
    else:
        tile_of_scales = tile_r * (4 * x[0].shape[0]) // SIDE
        y = times(x, _common_inverse(out, at, tile_of_scales, MODE, FORMAT, SCALING, FROM_AMAX))
    if TRANSPOSED:
        store_words(pack(y, FORMAT), codes_ptr, size[0], cols, in_cols, in_rows[0], tile_r, EVEN)
    else:
        for i in tl.static_range(4):
            codes_ptrs = codes_ptr + rows[i][:, None].to(tl.int64) * size[1] + cols[None, :]
            tl.store(codes_ptrs, to_codes(y[i], FORMAT), mask=in_rows[i][:, None] & in_cols[None, :])


@triton.jit
def emit_both(
    x, row_factors, column_fold, row_out, column_out, size, at,
    ROW_MODE: tl.constexpr, ROW_SCALING: tl.constexpr, COLUMN_MODE: tl.constexpr, COLUMN_SCALING: tl.constexpr,
    EVEN: tl.constexpr = False, FROM_AMAX: tl.constexpr = False,
):  # fmt: skip
    """`emit` a tile, columns times `row_factors`, and its transpose, rows times `column_fold`."""
    if ROW_MODE != NONE:
        emit(times(x, row_factors), row_out, size, at, ROW_MODE, ROW_SCALING, False, EVEN, FROM_AMAX)
    if COLUMN_MODE != NONE:
        y = times_each(x, factors_of_quads(column_fold, at[0], at[2]))
        emit(y, column_out, size, at, COLUMN_MODE, COLUMN_SCALING, True, EVEN, FROM_AMAX)
