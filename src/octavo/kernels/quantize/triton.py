"""Quantise to codes, transposed codes, or both, with any fold; in one read where the scales allow it.

The scale of a row, column or matrix must be known before the first code is written. So there are two passes: one
leaves the maxima in memory, one writes. Scales of tiles skip the first: a program holds such tiles whole. For row-wise
codes alone, each program holds a row.

The second pass runs in reverse order: the last reads of the first are still cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty, empty_scale
from octavo.kernels.triton.codes import (
    NONE,
    SIDE,
    emit_both,
    emit_row,
    emit_second_scale,
    end_search,
    factors,
    finite_magnitude,
    inside,
    load_quads,
    load_tile,
    mode_of,
    quads,
    rotate,
    search,
)
from octavo.kernels.triton.launch import Kernel, as_laid_out
from octavo.kernels.triton.output import Output, begin_searches
from octavo.kernels.triton.shape import Shape, next_power_of_2, row_warps
from octavo.numerics import Quantized, block_for

LONGEST_ROW = 16384
"""Longest row, in elements, that one program holds."""
LONGEST_WHOLE = 32768
"""The same for targets that only a program with the whole row can make: integer or rotated codes."""
SEARCH = Shape(4, 256, warps=1, steps=32, stages=3)
"""All steps together are 128 rows high, like a tile of scales."""
SEARCH_NARROW = Shape(8, 256, warps=4, steps=16, stages=3)
"""For narrow matrices, where `SEARCH` would occupy too few SMs."""
NARROW = 2048
"""Most columns for `SEARCH_NARROW`."""
WRITE = Shape(64, 64, warps=4)
TILED = Shape(64, SIDE.value, warps=4)
"""For scales of tiles of 128 columns."""
HIGH = Shape(SIDE.value, SIDE.value, warps=4, registers=168)
"""For scales of tiles of 128 rows."""


def unsupported_reason(*targets: QuantSpec | None, cols: int = 0) -> str | None:
    """Return why these kernels cannot produce the targets of a matrix with `cols` columns, or None."""
    for target in filter(None, targets):
        if target.needs_whole_rows:
            if target.granularity != "row" or any(other not in (None, target) for other in targets):
                return "INT8 and rotated codes are made with a scale per row, without those of the transpose"
            if cols > LONGEST_WHOLE:
                return f"a row of INT8 or rotated codes has more than {LONGEST_WHOLE} elements"
        if mode_of(target.granularity) is None:
            return f"no Triton kernel supports the granularity {target.granularity}"
    return None


def limits_registers(*targets: QuantSpec | None) -> bool:
    """Return whether kernels for these targets limit registers (`maxnreg`), which tracing compilers drop."""
    return any(target is not None and target.tile.rows == SIDE.value for target in targets) or any(
        target is not None and target.tile.cols == SIDE.value and target.tile.rows is None for target in targets
    )


def quantize_pair(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize.quantize_pair`."""
    whole = rows is not None and rows.needs_whole_rows
    sources = [torch.cat(list(sources), dim=1)] if whole and len(sources) > 1 else sources
    sources = [as_laid_out(contiguous_rows(source)) for source in sources]
    total_r, total_c = sources[0].shape
    longest = LONGEST_WHOLE if whole else LONGEST_ROW
    if len(sources) > 1:
        total_c = sum(source.shape[1] for source in sources)
    elif columns is None and rows is not None and rows.granularity == "row" and total_c <= longest:
        return _quantize_rows(sources[0], rows, row_fold), None
    row_fold, column_fold = (fold if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    device = sources[0].device
    row_output = Output(rows, total_r, total_c, device, in_sight=True)
    column_output = Output(columns, total_r, total_c, device, transposed=True, in_sight=True)
    tiled = row_output.is_tiled or column_output.is_tiled
    if tiled and any(source.shape[1] % SIDE.value for source in sources[:-1]):
        # A tile of scales would straddle two sources.
        sources = [torch.cat(list(sources), dim=1)]
    offsets = [sum(source.shape[1] for source in sources[:i]) for i in range(len(sources))]
    placed = list(zip(sources, offsets, strict=True))
    if row_output.searches or column_output.searches:
        begin_searches(row_output, column_output)
        for source, offset in placed:
            _search(source, offset, row_output, column_output, row_fold, column_fold)
    for source, offset in reversed(placed):
        _write(source, offset, (total_r, total_c), row_output, column_output, row_fold, column_fold)
    return row_output.quantized, column_output.quantized


def quantize_normed(
    x: Tensor, norm: tuple[Tensor, Tensor], target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]:
    """See `octavo.kernels.quantize.quantize_normed`."""
    rows = as_laid_out(contiguous_rows(x))
    scale = None if second is None else empty_scale(second, x.shape[0], x.shape[1], x.device)
    return _quantize_rows(rows, target, norm[1].contiguous(), norm[0].contiguous(), second, scale), scale


def _quantize_rows(
    x: Tensor,
    target: QuantSpec,
    fold: Tensor | None,
    row_factors: Tensor | None = None,
    second: QuantSpec | None = None,
    second_scale: Tensor | None = None,
) -> Quantized:
    rows, cols = x.shape
    out = empty(target, rows, cols, x.device)
    size = next_power_of_2(cols)
    ROWS[(rows,)](
        x, x.stride(0), row_factors, fold, out.codes, out.scale, second_scale, cols, **second_scaling(second),
        SCALING=target.rule, ROTATION=block_for(cols, target.rotation), SIZE=size,
        num_warps=row_warps(size, target.rotation != 0),
    )  # fmt: skip
    return out


def second_scaling(second: QuantSpec | None) -> dict[str, Any]:
    """Return the meta-parameters of `codes.second_scale_of`."""
    return {"SECOND": 0 if second is None else second.rule, "E4M3": second is None or second.format == "e4m3"}


def write_shape(row: Output, column: Output) -> Shape:
    """Return the launch shape that writes these outputs."""
    if row.is_high or column.is_high:
        return HIGH
    return TILED if row.is_tiled or column.is_tiled else WRITE


def search_shape(cols: int) -> Shape:
    """Return the launch shape that searches a matrix of `cols` columns."""
    return SEARCH_NARROW if cols <= NARROW else SEARCH


def _search(
    x: Tensor, offset: int, row: Output, column: Output, row_fold: Tensor | None, column_fold: Tensor | None
) -> None:
    rows, cols = x.shape
    shape = search_shape(cols)
    SEARCH_STRIP[shape.grid(rows, cols)](
        x, x.stride(0), rows, cols, offset, row_fold, column_fold, *row.arguments[2:], *column.arguments[2:],
        ROW_MODE=row.searched, COLUMN_MODE=column.searched, **shape.strip(rows, cols),
    )  # fmt: skip


def _write(
    x: Tensor, offset: int, total: tuple[int, int], row: Output, column: Output,
    row_fold: Tensor | None, column_fold: Tensor | None,
) -> None:  # fmt: skip
    rows, cols = x.shape
    shape = write_shape(row, column)
    across, down = shape.grid(rows, cols)
    WRITE_STRIP[(across * down,)](
        x, x.stride(0), rows, cols, offset, *total, row_fold, column_fold, *row.arguments, *column.arguments,
        ROW_MODE=row.mode, ROW_SCALING=row.scaling,
        COLUMN_MODE=column.mode, COLUMN_SCALING=column.scaling, FROM_AMAX=True,
        **shape.strip(rows, cols),
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    x_ptr, stride, factor_ptr, fold_ptr, codes_ptr, scale_ptr, second_scale, cols, SECOND: tl.constexpr,
    E4M3: tl.constexpr, SCALING: tl.constexpr, ROTATION: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One whole row per program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    mask = columns < cols
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x = x * tl.load(factor_ptr + row)
    if fold_ptr is not None:
        x = x * tl.load(fold_ptr + columns, mask=mask, other=1.0).to(tl.float32)
    emit_second_scale(x, second_scale, row, SECOND, E4M3)
    emit_row(rotate(x, ROTATION), codes_ptr, scale_ptr, row, cols, columns, mask, SCALING)


@triton.jit
def search_strip(
    x_ptr, stride, total_r, source_c, offset, row_fold, column_fold,
    row_stride_r, row_stride_c, row_amax, column_stride_r, column_stride_c, column_amax,
    ROW_MODE: tl.constexpr, COLUMN_MODE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Maxima over STEPS vertically adjacent tiles."""
    source = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(source, source_c, EVEN)
    cols = source + offset
    first = tl.program_id(1) * HEIGHT * STEPS
    row_factors = factors(row_fold, cols, in_cols)[None, :]
    row_running = tl.zeros((HEIGHT, WIDTH), tl.float32)
    column_running = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        rows = first + step * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = inside(rows, total_r, EVEN)
        x = load_tile(x_ptr, stride, rows, source, in_rows, in_cols)
        if ROW_MODE != NONE:
            folded = finite_magnitude(x * row_factors)
            row_running = search(folded, row_running, row_amax, rows, in_rows, ROW_MODE)
        if COLUMN_MODE != NONE:
            folded = finite_magnitude(x * factors(column_fold, rows, in_rows)[:, None])
            column_running = search(folded, column_running, column_amax, rows, in_rows, COLUMN_MODE)
    if ROW_MODE != NONE:
        end_search(row_running, row_amax, row_stride_r, row_stride_c, tl.program_id(1), cols, in_cols, ROW_MODE)
    if COLUMN_MODE != NONE:
        end_search(
            column_running, column_amax, column_stride_r, column_stride_c, tl.program_id(1), cols, in_cols, COLUMN_MODE
        )


@triton.jit
def write_strip(
    x_ptr, stride, total_r, source_c, offset, rows_out, cols_out, row_fold, column_fold,
    row_codes, row_scale, row_stride_r, row_stride_c, row_inverse,
    column_codes, column_scale, column_stride_r, column_stride_c, column_inverse,
    ROW_MODE: tl.constexpr, ROW_SCALING: tl.constexpr,
    COLUMN_MODE: tl.constexpr, COLUMN_SCALING: tl.constexpr, FROM_AMAX: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of STEPS vertically adjacent tiles, untransposed and transposed."""
    across = tl.cdiv(source_c, WIDTH)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    strip, tile_c = number // across, number % across
    source = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(source, source_c, EVEN)
    cols, tile_c = source + offset, tile_c + offset // WIDTH
    row_factors = factors(row_fold, cols, in_cols)[None, :]
    row_out = row_codes, row_scale, row_stride_r, row_stride_c, row_inverse
    column_out = column_codes, column_scale, column_stride_r, column_stride_c, column_inverse
    for step in tl.range(STEPS, num_stages=STAGES):
        tile_r = strip * STEPS + step
        rows, in_rows = quads(tile_r, total_r, HEIGHT, EVEN)
        x = load_quads(x_ptr, stride, None, rows, source, in_rows, in_cols)
        at = rows, cols, in_rows, in_cols, tile_r, tile_c
        emit_both(
            x, row_factors, column_fold, row_out, column_out, (rows_out, cols_out), at,
            ROW_MODE, ROW_SCALING, COLUMN_MODE, COLUMN_SCALING, EVEN, FROM_AMAX,
        )  # fmt: skip


ROWS, SEARCH_STRIP, WRITE_STRIP = Kernel(_rows_kernel), Kernel(search_strip), Kernel(write_strip)
