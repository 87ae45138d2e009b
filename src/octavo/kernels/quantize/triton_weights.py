"""Quantise many weights in one launch: one program per row, at any address."""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty
from octavo.kernels.quantize.triton import second_scaling
from octavo.kernels.triton.codes import (
    amax,
    emit_row,
    emit_second_scale,
    inside,
    load_tile,
    pack,
    quads,
    rotate,
    scale_of,
    store_words,
    to_codes,
)
from octavo.kernels.triton.launch import Kernel, as_laid_out
from octavo.kernels.triton.shape import Shape, next_power_of_2, row_warps
from octavo.numerics import PER_ROW, Quantized, block_for

LONGEST_ROW = 32768
"""Longest row, in elements, that one program holds."""
STACKED = 3
"""Most matrices in a stack, which one launch quantises."""
TILE = Shape(128, 64, warps=4)
"""Tile of a transpose; every matrix of a stack but the last must have whole tiles."""

_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def unsupported_reason(weights: Sequence[Tensor]) -> str | None:
    """Return why one launch cannot take these weights, or None."""
    if len({weight.dtype for weight in weights}) > 1 or weights[0].dtype not in _TRITON:
        return "the weights differ in dtype, or are neither FP32, BF16 nor FP16"
    if weights[0].shape[1] > LONGEST_ROW:
        return f"a row has more than {LONGEST_ROW} elements"
    if any(weight.stride(1) != 1 for weight in weights):
        return "the rows of a weight are not contiguous"
    return None


def quantize_rows_of(
    weights: Sequence[Tensor], target: QuantSpec, second: QuantSpec | None = None, keeps_codes: bool = False
) -> tuple[Quantized, Tensor | None, Tensor]:
    """Quantise up to three matrices (N_i, K) as one, (sum of N_i, K), with one scale per row.

    Args:
        second: second target, see `octavo.kernels.quantize.quantize_rows_twice`.
        keeps_codes: whether to write the codes of the second target, or its scales alone.

    Returns:
        Codes and scales; codes of the second target or None, and its scales, which are those of the first without one.
    """
    cols = weights[0].shape[1]
    if second is not None:  # may be an activation, whose strides a compiler would choose
        weights = [as_laid_out(weight) for weight in weights]
    ends = list(itertools.accumulate(weight.shape[0] for weight in weights))
    out = empty(target, ends[-1], cols, weights[0].device)
    made = None if second is None else empty(second, ends[-1], cols, weights[0].device)
    codes, scale = (None, None) if made is None else (made.codes if keeps_codes else None, made.scale)
    size = next_power_of_2(cols)
    _stack_kernel[(ends[-1],)](
        *_stack_arguments(weights, ends), out.codes, out.scale, codes, scale, cols,
        SCALING=target.rule, ROTATION=block_for(cols, target.rotation), **second_scaling(second),
        SIZE=size, num_warps=row_warps(size, target.rotation != 0),
    )  # fmt: skip
    return out, codes, out.scale if scale is None else scale


def quantize_rows_twice(
    matrices: Sequence[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool
) -> tuple[Quantized, Tensor | None, Tensor]:
    """See `octavo.kernels.quantize.quantize_rows_twice`; more than three matrices are copied into one."""
    stack = matrices if len(matrices) <= STACKED else [torch.cat(list(matrices))]
    return quantize_rows_of(stack, first, second, keeps_codes)


def requantize_transposed(
    weights: Sequence[Tensor],
    scale: Tensor,
    target: QuantSpec,
    after: Tensor,
    norm: tuple[Tensor, Tensor] | None = None,
) -> Quantized:
    """See `octavo.kernels.quantize.requantize_transposed`."""
    ends = list(itertools.accumulate(weight.shape[0] for weight in weights))
    straddles = len(weights) > STACKED or any(end % TILE.height for end in ends[:-1])
    if len(weights) > 1 and (straddles or unsupported_reason(weights)):
        weights, ends = [torch.cat(list(weights))], ends[-1:]
    weights = [contiguous_rows(weight) for weight in weights]
    rows, cols = ends[-1], weights[0].shape[1]
    surplus = -rows % 4
    codes = torch.empty(cols, rows + surplus, dtype=target.fmt.dtype, device=scale.device)
    ones = torch.empty(cols, 1, dtype=torch.float32, device=scale.device)
    _requantize_kernel[TILE.grid(rows, cols)](
        *_stack_arguments(weights, ends), *[x.contiguous() for x in norm or ()] or (None, None),
        scale, codes, ones, after, rows, cols,
        EVEN=TILE.strip(rows, cols)["EVEN"], HEIGHT=TILE.height, WIDTH=TILE.width, num_warps=TILE.warps,
    )  # fmt: skip
    return Quantized(codes[:, :rows].contiguous() if surplus else codes, ones, PER_ROW)


def _stack_arguments(weights: Sequence[Tensor], ends: Sequence[int]) -> tuple[Any, ...]:
    """Return the kernel arguments for up to three matrices: pointers, row strides, end rows of the first two.

    Args:
        ends: end row of each matrix in the stack.
    """
    strides = [weight.stride(0) for weight in weights]
    return *[*weights, None, None][:3], *[*strides, 0, 0][:3], ends[0], ends[min(1, len(ends) - 1)]


class Rows(NamedTuple):
    """Addresses of the rows of several weights."""

    addresses: Tensor
    """int64, one per row."""
    aligned: bool
    """Whether every row is 16-byte aligned, so that threads may load 16 bytes at once."""


def find_rows(weights: Sequence[Tensor]) -> Rows:
    """Return the row addresses of matrices (N_i, K) with contiguous rows."""
    starts = [torch.arange(w.shape[0], dtype=torch.int64) * (w.stride(0) * w.element_size()) for w in weights]
    table = torch.cat([start + w.data_ptr() for start, w in zip(starts, weights, strict=True)])
    aligned = all(w.data_ptr() % 16 == 0 and w.stride(0) * w.element_size() % 16 == 0 for w in weights)
    return Rows(table.to(weights[0].device), aligned)


def quantize_rows(rows: Rows, dtype: torch.dtype, out: Quantized, rule: int) -> None:
    """Quantise rows of `dtype` at any address into `out`, (rows, K) with one scale per row."""
    count, cols = out.codes.shape
    size = next_power_of_2(cols)
    _rows_at_kernel[(count,)](
        rows.addresses, out.codes, out.scale, cols, ALIGNED=rows.aligned, DTYPE=_TRITON[dtype],
        SCALING=rule, SIZE=size, num_warps=row_warps(size),
    )  # fmt: skip


@triton.jit
def _load_row(x_ptr, stride, row, columns, mask):
    return tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)


@Kernel
@triton.jit
def _stack_kernel(
    first, second, third, first_stride, second_stride, third_stride, first_end, second_end, codes_ptr, scale_ptr,
    second_codes, second_scale, cols,
    SCALING: tl.constexpr, SECOND: tl.constexpr, E4M3: tl.constexpr, ROTATION: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row per program, from the matrix that it belongs to; to two sets of codes, or the scales of the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    mask = columns < cols
    if second is None:
        x = _load_row(first, first_stride, row, columns, mask)
    elif third is None:
        if row < first_end:
            x = _load_row(first, first_stride, row, columns, mask)
        else:
            x = _load_row(second, second_stride, row - first_end, columns, mask)
    else:
        if row < first_end:
            x = _load_row(first, first_stride, row, columns, mask)
        elif row < second_end:
            x = _load_row(second, second_stride, row - first_end, columns, mask)
        else:
            x = _load_row(third, third_stride, row - second_end, columns, mask)
    if second_codes is not None:
        emit_row(x, second_codes, second_scale, row, cols, columns, mask, SECOND)
    else:
        emit_second_scale(x, second_scale, row, SECOND, E4M3)
    emit_row(rotate(x, ROTATION), codes_ptr, scale_ptr, row, cols, columns, mask, SCALING)


@triton.jit
def _load_scaled(x_ptr, stride, rstd_ptr, norm_ptr, scale_ptr, start, rows, cols, in_rows, in_cols):
    """Load a quarter of a tile, divided by its row scales, of a weight that begins at row `start` of the stack."""
    x = load_tile(x_ptr, stride, rows - start, cols, in_rows, in_cols)
    if rstd_ptr is not None:
        x = x * tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)[:, None]
        x = x * tl.load(norm_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    bits = tl.load(scale_ptr + rows, mask=in_rows, other=1.0).to(tl.int32, bitcast=True)
    return x * ((254 << 23) - bits).to(tl.float32, bitcast=True)[:, None]  # a power of two: the inverse is exact


@Kernel
@triton.jit
def _requantize_kernel(
    first, second, third, first_stride, second_stride, third_stride, first_end, second_end, rstd_ptr, norm_ptr,
    scale_ptr, codes_ptr, ones_ptr, after, total_r, total_c,
    EVEN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile per program, from the weight that it belongs to. `after` is not read, as in `transpose_tile`."""
    tile_r = tl.program_id(1)
    rows, in_rows = quads(tile_r, total_r, HEIGHT, EVEN)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(cols, total_c, EVEN)
    tl.store(ones_ptr + cols, tl.full((WIDTH,), 1.0, tl.float32), mask=in_cols & (tile_r == 0))
    x_ptr = first
    stride = tl.full((), first_stride, tl.int64)
    start = tl.full((), 0, tl.int32)
    if second is not None:
        if tile_r * HEIGHT >= first_end:
            x_ptr = second
            stride = tl.full((), second_stride, tl.int64)
            start = tl.full((), first_end, tl.int32)
    if third is not None:
        if tile_r * HEIGHT >= second_end:
            x_ptr = third
            stride = tl.full((), third_stride, tl.int64)
            start = tl.full((), second_end, tl.int32)
    y = ()
    for i in tl.static_range(4):
        y += (_load_scaled(x_ptr, stride, rstd_ptr, norm_ptr, scale_ptr, start, rows[i], cols, in_rows[i], in_cols),)
    words = pack(y, codes_ptr.dtype.element_ty)
    store_words(words, codes_ptr, total_r, cols, in_cols, in_rows[0], tile_r)


@Kernel
@triton.jit
def _rows_at_kernel(
    addresses, codes_ptr, scale_ptr, cols,
    ALIGNED: tl.constexpr, DTYPE: tl.constexpr, SCALING: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    mask = columns < cols
    x_ptr = tl.load(addresses + row).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = scale_of(amax(x, 0), codes_ptr.dtype.element_ty, SCALING)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * cols + columns, to_codes(x * inverse, codes_ptr.dtype.element_ty), mask=mask)
