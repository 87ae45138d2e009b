"""Single-matrix kernels launched for a batch: the third grid dimension is the index of the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.batch import Batch
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import triton as single
from octavo.kernels.transpose import triton as single_transpose
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.output import Output, begin_searches, end_searches

MOST = 65535
"""Limit of the third grid dimension."""


def unsupported_reason(x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None) -> str | None:
    """Return why these kernels cannot produce the targets from x (B, R, C), or None."""
    if x.shape[0] > MOST:
        return f"more than {MOST} matrices"
    transposes = columns is not None if not _is_transposed(x) else rows is not None
    if transposes and x.shape[2 if _is_transposed(x) else 1] % 4:
        return "a transpose is stored in words of four codes, and the rows are not a multiple of 4"
    return single.unsupported_reason(rows, columns)


def quantize_batch(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_fold: Tensor | None, column_fold: Tensor | None
) -> tuple[Batch | None, Batch | None]:
    """See `octavo.kernels.batch.quantize_batch`."""
    if _is_transposed(x):
        by_columns, by_rows = quantize_batch(x.mT, columns, rows, _transposed(column_fold), _transposed(row_fold))
        return by_rows, by_columns
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, height, width = x.shape
    if rows is not None and rows.granularity == "row" and columns is None and row_fold is None and x.is_contiguous():
        made = single.quantize_pair([x.view(batch * height, width)], rows, None)[0]
        assert made is not None
        return Batch(made.codes.view(x.shape), made.scale.view(batch, height, 1), rows.tile), None
    row_fold, column_fold = (fold if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    row = Output(rows, height, width, x.device, in_sight=True, batch=batch)
    column = Output(columns, height, width, x.device, transposed=True, in_sight=True, batch=batch)
    of_x = x, x.stride(0), x.stride(1)
    if row.searches or column.searches:
        begin_searches(row, column)
        shape = single.search_shape(width)
        _batch_search_kernel[(*shape.grid(height, width), batch)](
            *of_x, height, width, row_fold, column_fold, *row.arguments[2:], row.scales, *column.arguments[2:],
            column.scales, ROW_MODE=row.searched, COLUMN_MODE=column.searched, **shape.strip(height, width),
        )  # fmt: skip
        end_searches(row, column)
    shape = single.write_shape(row, column)
    across, down = shape.grid(height, width)
    _batch_write_kernel[(across * down, 1, batch)](
        *of_x, height, width, row_fold, column_fold, *row.arguments, row.scales, *column.arguments, column.scales,
        ROW_MODE=row.mode, ROW_SCALING=row.scaling, COLUMN_MODE=column.mode, COLUMN_SCALING=column.scaling,
        **shape.strip(height, width),
    )  # fmt: skip
    by_rows, by_columns = (None if made is None else Batch(*made) for made in (row.quantized, column.quantized))
    return by_rows, by_columns


def transpose_batch(codes: Tensor) -> Tensor:
    """Return the transposes (B, C, R) of contiguous codes (B, R, C), R a multiple of 4."""
    batch, rows, cols = codes.shape
    out = torch.empty(batch, cols, rows, dtype=codes.dtype, device=codes.device)
    shape = single_transpose.SHAPE
    for first in range(0, batch, MOST):
        part = slice(first, first + MOST)
        _batch_transpose_kernel[(*shape.grid(rows, cols), len(out[part]))](
            codes[part].view(torch.uint8), out[part].view(torch.uint8), rows, cols,
            EVEN=shape.strip(rows, cols)["EVEN"], **shape.meta(),
        )  # fmt: skip
    return out


def _is_transposed(x: Tensor) -> bool:
    return x.stride(2) != 1 and x.stride(1) == 1


def _transposed(fold: Tensor | None) -> Tensor | None:
    return None if fold is None else fold.mT


@Kernel
@triton.jit
def _batch_search_kernel(
    x_ptr, batch_stride, stride, total_r, total_c, row_fold, column_fold,
    row_stride_r, row_stride_c, row_amax, row_scales, column_stride_r, column_stride_c, column_amax, column_scales,
    ROW_MODE: tl.constexpr, COLUMN_MODE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    if row_fold is not None:
        row_fold += number * total_c
    if column_fold is not None:
        column_fold += number * total_r
    if row_amax is not None:
        row_amax += number * row_scales
    if column_amax is not None:
        column_amax += number * column_scales
    single.search_strip(
        x_ptr + number * batch_stride, stride, total_r, total_c, 0, row_fold, column_fold,
        row_stride_r, row_stride_c, row_amax, column_stride_r, column_stride_c, column_amax,
        ROW_MODE=ROW_MODE, COLUMN_MODE=COLUMN_MODE,
        HEIGHT=HEIGHT, WIDTH=WIDTH, STEPS=STEPS, STAGES=STAGES, EVEN=EVEN,
    )  # fmt: skip


@Kernel
@triton.jit
def _batch_write_kernel(
    x_ptr, batch_stride, stride, total_r, total_c, row_fold, column_fold,
    row_codes, row_scale, row_stride_r, row_stride_c, row_inverse, row_scales,
    column_codes, column_scale, column_stride_r, column_stride_c, column_inverse, column_scales,
    ROW_MODE: tl.constexpr, ROW_SCALING: tl.constexpr, COLUMN_MODE: tl.constexpr, COLUMN_SCALING: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    size = number * total_r * total_c
    if row_fold is not None:
        row_fold += number * total_c
    if column_fold is not None:
        column_fold += number * total_r
    if row_codes is not None:
        row_codes += size
        row_scale += number * row_scales
    if row_inverse is not None:
        row_inverse += number * row_scales
    if column_codes is not None:
        column_codes += size
        column_scale += number * column_scales
    if column_inverse is not None:
        column_inverse += number * column_scales
    single.write_strip(
        x_ptr + number * batch_stride, stride, total_r, total_c, 0, total_r, total_c, row_fold, column_fold,
        row_codes, row_scale, row_stride_r, row_stride_c, row_inverse,
        column_codes, column_scale, column_stride_r, column_stride_c, column_inverse,
        ROW_MODE=ROW_MODE, ROW_SCALING=ROW_SCALING,
        COLUMN_MODE=COLUMN_MODE, COLUMN_SCALING=COLUMN_SCALING, FROM_AMAX=False,
        HEIGHT=HEIGHT, WIDTH=WIDTH, STEPS=STEPS, STAGES=STAGES, EVEN=EVEN,
    )  # fmt: skip


@Kernel
@triton.jit
def _batch_transpose_kernel(
    x_ptr, out_ptr, total_r, total_c, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr
):
    size = tl.program_id(2).to(tl.int64) * total_r * total_c
    single_transpose.transpose_tile(
        x_ptr + size, out_ptr + size, None, None, total_r, total_c, EVEN=EVEN, HEIGHT=HEIGHT, WIDTH=WIDTH
    )
