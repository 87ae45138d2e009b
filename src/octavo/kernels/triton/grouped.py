"""Quantise and transpose tokens group by group, without the host knowing the groups.

Programs walk over *padded* positions. A first kernel notes for each the token that is there, -1 for none, and its
expert. Sixteen positions that start at a multiple of 16 belong to one expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.padding import ALIGNMENT, padded_length
from octavo.kernels.quant_spec import QuantSpec, contiguous_rows
from octavo.kernels.triton.codes import finite_magnitude, pack, quads, store_quarter, store_words
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Shape, cdiv
from octavo.numerics import scale_from_amax

WRITE = Shape(64, 64, warps=4)
SEARCH = Shape(ALIGNMENT, 256, warps=4, steps=4)
TRANSPOSE = Shape(128, 64, warps=4)


def quantize_groups(
    x: Tensor,
    ends: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None,
    column_fold: Tensor | None,
    source: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """See `octavo.kernels.grouped.quantize_groups`: (codes, scale) of either."""
    x = contiguous_rows(x)
    tokens, cols, experts, device = len(x if source is None else source), x.shape[1], ends.shape[0], x.device
    row_fold, column_fold = (fold if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    token_at, expert_at = _places(ends, tokens)
    row_amax = torch.zeros(tokens, 1, dtype=torch.float32, device=device) if rows else None
    column_amax = torch.zeros(experts, cols, dtype=torch.float32, device=device) if columns else None
    _search_kernel[SEARCH.grid(len(token_at), cols)](
        x, x.stride(0), cols, len(token_at), source, token_at, expert_at, row_fold, column_fold, row_amax, column_amax,
        STEPS=SEARCH.steps, **SEARCH.meta(),
    )  # fmt: skip
    row_codes = row_scale = row_inverse = column_codes = column_scale = column_inverse = None
    if rows is not None and row_amax is not None:
        row_scale, row_inverse = scale_from_amax(row_amax, rows.fmt, rows.scaling)
        row_codes = torch.empty(tokens, cols, dtype=rows.fmt.dtype, device=device)
    if columns is not None and column_amax is not None:
        column_scale, column_inverse = scale_from_amax(column_amax, columns.fmt, columns.scaling)
        column_codes = torch.empty(cols, len(token_at), dtype=columns.fmt.dtype, device=device)
    across, down = WRITE.grid(len(token_at), cols)
    _write_kernel[(across * down,)](
        x, x.stride(0), cols, len(token_at), source, token_at, expert_at, row_fold, column_fold,
        row_codes, row_inverse, column_codes, column_inverse, **WRITE.meta(),
    )  # fmt: skip
    return (
        None if row_codes is None or row_scale is None else (row_codes, row_scale),
        None if column_codes is None or column_scale is None else (column_codes, column_scale),
    )


def transpose_groups(codes: Tensor, ends: Tensor, source: Tensor | None = None) -> Tensor:
    """See `octavo.kernels.grouped.transpose_groups`."""
    codes = codes.contiguous()
    tokens, cols = len(codes if source is None else source), codes.shape[1]
    token_at, _ = _places(ends, tokens)
    out = torch.empty(cols, len(token_at), dtype=codes.dtype, device=codes.device)
    _transpose_kernel[TRANSPOSE.grid(len(token_at), cols)](
        codes.view(torch.uint8), out.view(torch.uint8), cols, len(token_at), source, token_at,
        **TRANSPOSE.meta(),
    )  # fmt: skip
    return out


def _places(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the token at each padded position, -1 for none, and its expert, int32 (P,) each."""
    experts = ends.shape[0]
    token_at, expert_at = torch.empty(2, padded_length(tokens, experts), dtype=torch.int32, device=ends.device)
    size = 1024
    _places_kernel[(cdiv(len(token_at), size),)](
        ends.contiguous(), token_at, expert_at, experts, len(token_at), ALIGNMENT=ALIGNMENT, SIZE=size, num_warps=4
    )
    return token_at, expert_at


@Kernel
@triton.jit
def _places_kernel(ends_ptr, token_ptr, expert_ptr, experts, total, ALIGNMENT: tl.constexpr, SIZE: tl.constexpr):
    position = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    token = tl.full((SIZE,), -1, tl.int32)
    expert = tl.full((SIZE,), 0, tl.int32)
    start, padded = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for e in tl.range(0, experts):
        end = tl.load(ends_ptr + e)
        room = tl.maximum(tl.cdiv(end - start, ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        inside = position - padded
        token = tl.where((inside >= 0) & (inside < end - start), start + inside, token)
        expert = tl.where((inside >= 0) & (inside < room), e, expert)
        start, padded = end, padded + room
    tl.store(token_ptr + position, token, mask=position < total)
    tl.store(expert_ptr + position, expert, mask=position < total)


@triton.jit
def _rows(source_ptr, tokens):
    """Which rows of x some tokens are."""
    if source_ptr is None:
        rows = tokens
    else:
        rows = tl.load(source_ptr + tokens, mask=tokens >= 0, other=0)
    return rows[:, None].to(tl.int64)


@triton.jit
def _load(x_ptr, stride, source_ptr, tokens, cols, in_cols):
    """Rows of x in FP32, zero where there is no token."""
    where = x_ptr + _rows(source_ptr, tokens) * stride + cols[None, :]
    return tl.load(where, mask=(tokens >= 0)[:, None] & in_cols[None, :], other=0.0).to(tl.float32)


@triton.jit
def _of_expert(table_ptr, experts, total_c, cols, in_cols, other: tl.constexpr):
    """What a table (E, C) has for each of some tokens: (R, C)."""
    if table_ptr is None:
        value = tl.full((experts.shape[0], cols.shape[0]), other, tl.float32)
    else:
        where = table_ptr + experts[:, None].to(tl.int64) * total_c + cols[None, :]
        value = tl.load(where, mask=in_cols[None, :], other=other)
    return value


@triton.jit
def _of_token(table_ptr, tokens, other: tl.constexpr):
    """What a table (T,) has for each of some tokens: (R, 1)."""
    if table_ptr is None:
        value = tl.full((tokens.shape[0], 1), other, tl.float32)
    else:
        value = tl.load(table_ptr + tokens[:, None], mask=(tokens >= 0)[:, None], other=other)
    return value


@Kernel
@triton.jit
def _search_kernel(
    x_ptr, stride, total_c, total_r, source_ptr, token_at, expert_at, row_fold, column_fold, row_amax, column_amax,
    STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The maxima of tokens, and of columns within an expert. A step is HEIGHT positions of one expert."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    for step in tl.static_range(STEPS):
        positions = (tl.program_id(1) * STEPS + step) * HEIGHT + tl.arange(0, HEIGHT)
        tokens = tl.load(token_at + positions, mask=positions < total_r, other=-1)
        experts = tl.load(expert_at + positions, mask=positions < total_r, other=0)
        x = _load(x_ptr, stride, source_ptr, tokens, cols, in_cols)
        if row_amax is not None:
            folded = x * _of_expert(row_fold, experts, total_c, cols, in_cols, 1.0)
            largest = tl.maximum(tl.max(finite_magnitude(folded), axis=1), 0.0)
            where = row_amax.to(tl.pointer_type(tl.int32)) + tokens  # FP32 that is not negative is ordered as its bits
            tl.atomic_max(where, largest.to(tl.int32, bitcast=True), mask=tokens >= 0, sem="relaxed")
        if column_amax is not None:
            folded = x * _of_token(column_fold, tokens, 1.0)
            largest = tl.maximum(tl.max(finite_magnitude(folded), axis=0), 0.0)
            expert = tl.max(experts, axis=0).to(tl.int64)
            where = column_amax.to(tl.pointer_type(tl.int32)) + expert * total_c + cols
            tl.atomic_max(where, largest.to(tl.int32, bitcast=True), mask=in_cols & (largest > 0.0), sem="relaxed")


@Kernel
@triton.jit
def _write_kernel(
    x_ptr, stride, total_c, total_r, source_ptr, token_at, expert_at, row_fold, column_fold,
    row_codes, row_inverse, column_codes, column_inverse, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of padded positions: of its tokens as they lie, and of all positions transposed."""
    across = tl.cdiv(total_c, WIDTH)
    tile_r, tile_c = tl.program_id(0) // across, tl.program_id(0) % across
    cols = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    rows, in_rows = quads(tile_r, total_r, HEIGHT, False)
    t0 = tl.load(token_at + rows[0], mask=in_rows[0], other=-1)
    t1 = tl.load(token_at + rows[1], mask=in_rows[1], other=-1)
    t2 = tl.load(token_at + rows[2], mask=in_rows[2], other=-1)
    t3 = tl.load(token_at + rows[3], mask=in_rows[3], other=-1)
    experts = tl.load(expert_at + rows[0], mask=in_rows[0], other=0)  # of four rows that stand together
    x0 = _load(x_ptr, stride, source_ptr, t0, cols, in_cols)
    x1 = _load(x_ptr, stride, source_ptr, t1, cols, in_cols)
    x2 = _load(x_ptr, stride, source_ptr, t2, cols, in_cols)
    x3 = _load(x_ptr, stride, source_ptr, t3, cols, in_cols)
    if row_codes is not None:
        ROW_FORMAT: tl.constexpr = row_codes.dtype.element_ty
        fold = _of_expert(row_fold, experts, total_c, cols, in_cols, 1.0)
        y0 = x0 * fold * _of_token(row_inverse, t0, 0.0)
        y1 = x1 * fold * _of_token(row_inverse, t1, 0.0)
        y2 = x2 * fold * _of_token(row_inverse, t2, 0.0)
        y3 = x3 * fold * _of_token(row_inverse, t3, 0.0)
        store_quarter(y0, row_codes, total_c, t0, cols, t0 >= 0, in_cols, ROW_FORMAT)
        store_quarter(y1, row_codes, total_c, t1, cols, t1 >= 0, in_cols, ROW_FORMAT)
        store_quarter(y2, row_codes, total_c, t2, cols, t2 >= 0, in_cols, ROW_FORMAT)
        store_quarter(y3, row_codes, total_c, t3, cols, t3 >= 0, in_cols, ROW_FORMAT)
    if column_codes is not None:
        inverse = _of_expert(column_inverse, experts, total_c, cols, in_cols, 0.0)
        y0 = x0 * _of_token(column_fold, t0, 1.0) * inverse
        y1 = x1 * _of_token(column_fold, t1, 1.0) * inverse
        y2 = x2 * _of_token(column_fold, t2, 1.0) * inverse
        y3 = x3 * _of_token(column_fold, t3, 1.0) * inverse
        words = pack((y0, y1, y2, y3), column_codes.dtype.element_ty)
        store_words(words, column_codes, total_r, cols, in_cols, in_rows[0], tile_r)


@triton.jit
def _load_bytes(x_ptr, total_c, source_ptr, token_at, rows, in_rows, cols, in_cols):
    tokens = tl.load(token_at + rows, mask=in_rows, other=-1)
    where = x_ptr + _rows(source_ptr, tokens) * total_c + cols[None, :]
    return tl.load(where, mask=(tokens >= 0)[:, None] & in_cols[None, :], other=0).to(tl.uint32)


@Kernel
@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, total_c, total_r, source_ptr, token_at, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows, in_rows = quads(tl.program_id(1), total_r, HEIGHT, False)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    words = _load_bytes(x_ptr, total_c, source_ptr, token_at, rows[0], in_rows[0], cols, in_cols)
    words |= _load_bytes(x_ptr, total_c, source_ptr, token_at, rows[1], in_rows[1], cols, in_cols) << 8
    words |= _load_bytes(x_ptr, total_c, source_ptr, token_at, rows[2], in_rows[2], cols, in_cols) << 16
    words |= _load_bytes(x_ptr, total_c, source_ptr, token_at, rows[3], in_rows[3], cols, in_cols) << 24
    store_words(words, out_ptr, total_r, cols, in_cols, in_rows[0], tl.program_id(1))
