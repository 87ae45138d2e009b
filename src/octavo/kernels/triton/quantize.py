"""Quantise in one read where the scales allow it: codes, transposed codes, or both, with any fold.

A scale of a whole row, column or matrix must be known before the first code is written. So there are two passes: one
that leaves the maxima in memory, one that writes. Scales of small tiles skip the first. Codes of whole rows alone are
made by programs that each hold a row.

The second pass walks backwards: what the first one read last is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.target import Target, contiguous_rows, empty
from octavo.kernels.triton.codes import NONE, emit, end_search, finite_magnitude, mode_of, scale_of, search, to_codes
from octavo.kernels.triton.output import SIDE, Output
from octavo.numerics import Quantized

LONGEST_ROW = 16384
"""Elements of a row that one program still holds."""


def refuses(*targets: Target | None) -> str | None:
    """Return why the kernels here cannot make these targets, or None."""
    for target in filter(None, targets):
        if mode_of(target.granularity) is None:
            return f"no Triton kernel has the granularity {target.granularity}"
    return None


def quantize_pair(
    sources: Sequence[Tensor],
    rows: Target | None,
    columns: Target | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize.quantize_pair`."""
    sources = [contiguous_rows(source) for source in sources]
    total_r, total_c = sources[0].shape[0], sum(source.shape[1] for source in sources)
    if columns is None and rows is not None and rows.granularity == "row" and len(sources) == 1:
        if total_c <= LONGEST_ROW:
            return _quantize_rows(sources[0], rows, row_fold), None
    device = sources[0].device
    row_output = Output(rows, total_r, total_c, device)
    column_output = Output(columns, total_r, total_c, device, transposed=True)
    tiled = row_output.is_tiled or column_output.is_tiled
    if tiled and any(source.shape[1] % SIDE for source in sources[:-1]):  # a tile of scales would straddle two sources
        sources = [torch.cat(list(sources), dim=1)]
    offsets = [sum(source.shape[1] for source in sources[:i]) for i in range(len(sources))]
    placed = list(zip(sources, offsets, strict=True))
    if row_output.searches or column_output.searches:
        for source, offset in placed:
            _search(source, offset, row_output, column_output, row_fold, column_fold)
    for source, offset in reversed(placed):
        _write(source, offset, (total_r, total_c), row_output, column_output, row_fold, column_fold)
    return row_output.quantized, column_output.quantized


def _quantize_rows(x: Tensor, target: Target, fold: Tensor | None) -> Quantized:
    rows, cols = x.shape
    out = empty(target, rows, cols, x.device)
    size = triton.next_power_of_2(cols)
    _rows_kernel[(rows,)](
        x, x.stride(0), fold, out.codes, out.scale, cols,
        POWER_OF_TWO=target.scaling == "power_of_two", SIZE=size, num_warps=min(max(size // 1024, 1), 16),
    )  # fmt: skip
    return out


def _search(
    x: Tensor, offset: int, row: Output, column: Output, row_fold: Tensor | None, column_fold: Tensor | None
) -> None:
    rows, cols = x.shape
    height, width, steps = 32, 256, 8
    grid = (triton.cdiv(cols, width), triton.cdiv(rows, height * steps))
    _search_kernel[grid](
        x, x.stride(0), rows, cols, offset, row_fold, column_fold, row.arguments[-1], column.arguments[-1],
        ROW_MODE=row.mode if row.searches else NONE.value, COLUMN_MODE=column.mode if column.searches else NONE.value,
        HEIGHT=height, WIDTH=width, STEPS=steps, num_warps=8,
    )  # fmt: skip


def _write(
    x: Tensor, offset: int, total: tuple[int, int], row: Output, column: Output,
    row_fold: Tensor | None, column_fold: Tensor | None,
) -> None:  # fmt: skip
    rows, cols = x.shape
    height, width = (SIDE, SIDE) if row.is_tiled or column.is_tiled else (64, 128)
    grid = (triton.cdiv(cols, width) * triton.cdiv(rows, height),)
    _write_kernel[grid](
        x, x.stride(0), rows, cols, offset, *total, row_fold, column_fold, *row.arguments, *column.arguments,
        ROW_MODE=row.mode, ROW_POWER_OF_TWO=row.constants[1],
        COLUMN_MODE=column.mode, COLUMN_POWER_OF_TWO=column.constants[1],
        HEIGHT=height, WIDTH=width, num_warps=8 if height == SIDE else 4,
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    x_ptr, stride, fold_ptr, codes_ptr, scale_ptr, cols, POWER_OF_TWO: tl.constexpr, SIZE: tl.constexpr
):
    """One row a program, held whole."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    inside = columns < cols
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if fold_ptr is not None:
        x = x * tl.load(fold_ptr + columns, mask=inside, other=1.0)
    scale, inverse = scale_of(tl.max(finite_magnitude(x), axis=0), codes_ptr.dtype.element_ty, POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * cols + columns, to_codes(x * inverse, codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load(x_ptr, stride, rows, cols, in_rows, in_cols):
    where = x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(where, mask=in_rows[:, None] & in_cols[None, :], other=0.0).to(tl.float32)


@triton.jit
def _fold_columns(x, fold_ptr, cols, in_cols):
    """Multiply each column by its factor."""
    if fold_ptr is not None:
        x = x * tl.load(fold_ptr + cols, mask=in_cols, other=1.0)[None, :]
    return x


@triton.jit
def _fold_rows(x, fold_ptr, rows, in_rows):
    """Multiply each row by its factor."""
    if fold_ptr is not None:
        x = x * tl.load(fold_ptr + rows, mask=in_rows, other=1.0)[:, None]
    return x


@triton.jit
def _search_kernel(
    x_ptr, stride, total_r, source_c, offset, row_fold, column_fold, row_amax, column_amax,
    ROW_MODE: tl.constexpr, COLUMN_MODE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The maxima of a region of STEPS tiles, one under the other."""
    source = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = source < source_c
    cols = source + offset
    first = tl.program_id(1) * HEIGHT * STEPS
    row_running = tl.zeros((HEIGHT, WIDTH), tl.float32)
    column_running = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for step in range(STEPS):
        rows = first + step * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = rows < total_r
        x = _load(x_ptr, stride, rows, source, in_rows, in_cols)
        if ROW_MODE != NONE:
            folded = finite_magnitude(_fold_columns(x, row_fold, cols, in_cols))
            row_running = search(folded, row_running, row_amax, rows, in_rows, ROW_MODE)
        if COLUMN_MODE != NONE:
            folded = finite_magnitude(_fold_rows(x, column_fold, rows, in_rows))
            column_running = search(folded, column_running, column_amax, rows, in_rows, COLUMN_MODE)
    if ROW_MODE != NONE:
        end_search(row_running, row_amax, cols, in_cols, ROW_MODE)
    if COLUMN_MODE != NONE:
        end_search(column_running, column_amax, cols, in_cols, COLUMN_MODE)


@triton.jit
def _write_kernel(
    x_ptr, stride, total_r, source_c, offset, rows_out, cols_out, row_fold, column_fold,
    row_codes, row_scale, row_stride_r, row_stride_c, row_amax,
    column_codes, column_scale, column_stride_r, column_stride_c, column_amax,
    ROW_MODE: tl.constexpr, ROW_POWER_OF_TWO: tl.constexpr,
    COLUMN_MODE: tl.constexpr, COLUMN_POWER_OF_TWO: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile a program: its codes as they lie, and transposed."""
    across = tl.cdiv(source_c, WIDTH)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_r, tile_c = number // across, number % across
    rows = tile_r * HEIGHT + tl.arange(0, HEIGHT)
    source = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_rows, in_cols = rows < total_r, source < source_c
    x = _load(x_ptr, stride, rows, source, in_rows, in_cols)
    cols, tile_c = source + offset, tile_c + offset // WIDTH
    if ROW_MODE != NONE:
        emit(
            _fold_columns(x, row_fold, cols, in_cols), row_codes, rows_out, cols_out,
            row_scale, row_stride_r, row_stride_c, row_amax, rows, cols, in_rows, in_cols, tile_r, tile_c,
            MODE=ROW_MODE, POWER_OF_TWO=ROW_POWER_OF_TWO, TRANSPOSED=False,
        )  # fmt: skip
    if COLUMN_MODE != NONE:
        emit(
            _fold_rows(x, column_fold, rows, in_rows), column_codes, rows_out, cols_out,
            column_scale, column_stride_r, column_stride_c, column_amax, rows, cols, in_rows, in_cols, tile_r, tile_c,
            MODE=COLUMN_MODE, POWER_OF_TWO=COLUMN_POWER_OF_TWO, TRANSPOSED=True,
        )  # fmt: skip
