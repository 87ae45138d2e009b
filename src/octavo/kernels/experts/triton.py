"""Passes over rows grouped by expert; see `octavo.kernels.experts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation.triton import gradients, gradients_of_quads, sources_of, tiles_of
from octavo.kernels.grouped.padding import ALIGNMENT, padded_length
from octavo.kernels.grouped.triton import (
    STRIP,
    ColumnOutput,
    blocks_of,
    enter_maxima,
    load_block,
    strips,
    tile_of_block,
)
from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import (
    SIDE,
    amax,
    emit_row,
    factors,
    factors_of_quads,
    finite_magnitude,
    inside,
    load_tile,
    pack,
    rotate,
    row_codes,
    scale_of,
    store_words,
    times,
    times_each,
    to_codes,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Rows, Shape, next_power_of_2, row_warps
from octavo.numerics import Quantized, block_for

ROWS = Rows(1024, 16)
COLUMNS = Shape(64, 32, warps=4)
"""Launch shapes of the two passes of the activation's backward."""


def quantize_tokens(x: Tensor, place: Tensor, target: QuantSpec, second: QuantSpec | None = None) -> list[Quantized]:
    """See `octavo.kernels.experts.quantize_tokens`."""
    x, (tokens, cols) = contiguous_rows(x), x.shape
    made = [empty(spec, rows, cols, x.device) for spec, rows in ((second or target, tokens), (target, place.numel()))]
    _quantize_kernel[(tokens,)](
        x, x.stride(0), cols, place.contiguous(), *made[0][:2], *made[1][:2],
        COPIES=place.shape[1], SCALING=target.rule, ROTATION=block_for(cols, target.rotation),
        SECOND=None if second is None else second.rule, **_meta(cols),
    )  # fmt: skip
    return made


def combine(y: Tensor, place: Tensor) -> Tensor:
    """See `octavo.kernels.experts.combine`."""
    y = y.contiguous()
    out = torch.empty(place.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    _combine_kernel[(len(out),)](y, out, place.contiguous(), y.shape[1], COPIES=place.shape[1], **_meta(y.shape[1]))
    return out


def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    weights: Tensor,
    ends: Tensor,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None, Tensor | None, Tensor]:
    """See `octavo.kernels.experts.activation_backward`: D by rows, by columns, codes of h, d weights."""
    (rows, columns, hidden), (row_fold, column_fold, scale) = targets, factors
    (count, width), device = dh.shape, dh.device
    wide, blocks = width if up is None else 2 * width, blocks_of(ends, count)
    row = None if rows is None else empty(rows, count, wide, device)
    column = None if columns is None else ColumnOutput.of(columns, wide, ends, count)
    d_weights = torch.empty(count, dtype=torch.float32, device=device)
    folds = (None if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    row_fold, column_fold = folds
    sources = *sources_of(dh, gate, up), count, width, weights.contiguous(), blocks.table, blocks.total, column_fold
    _backward_rows_kernel[(blocks.total * (ALIGNMENT // STRIP),)](
        *sources, row_fold, *((None, None) if row is None else row[:2]), None if column is None else column.amax,
        d_weights, KIND=kind, SCALING=0 if rows is None else rows.rule, **strips(ROWS, width),
    )  # fmt: skip
    h_t = None
    if hidden is not None:
        h_t = torch.empty(width, padded_length(count, len(ends)), dtype=hidden.fmt.dtype, device=device)
    if columns is not None and column is not None:
        column.end_search(columns)
    if column is not None or h_t is not None:
        across, down = COLUMNS.grid(blocks.total * ALIGNMENT, width)
        _backward_columns_kernel[(across * down,)](
            *sources, *((None, None) if column is None else (column.codes, column.amax)),
            h_t, None if scale is None else scale.contiguous(), KIND=kind, ALIGNMENT=ALIGNMENT, **COLUMNS.meta(),
        )  # fmt: skip
    return row and row[:2], column and column[:2], h_t, d_weights


def _meta(cols: int) -> dict[str, object]:
    size = max(next_power_of_2(cols), SIDE.value)
    return {"SIZE": size, "num_warps": row_warps(size), "enable_fp_fusion": False}


@Kernel
@triton.jit
def _quantize_kernel(
    x_ptr, stride, total_c, place_ptr, token_codes, token_scale, row_codes_ptr, row_scale,
    COPIES: tl.constexpr, SCALING: tl.constexpr, ROTATION: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantise one token; store its codes once per expert that it is routed to, and in token order.

    SECOND: scaling rule of the codes in token order, if they are a second set; None if they are the same.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    mask = cols < total_c
    x = tl.load(x_ptr + token * stride + cols, mask=mask, other=0.0).to(tl.float32)
    codes, scale = row_codes(rotate(x, ROTATION), row_codes_ptr.dtype.element_ty, SCALING)
    if SECOND is not None:
        emit_row(x, token_codes, token_scale, token, total_c, cols, mask, SECOND)
    else:
        tl.store(token_scale + token, scale)
        tl.store(token_codes + token * total_c + cols, codes, mask=mask)
    for copy in tl.static_range(COPIES):
        row = tl.load(place_ptr + token * COPIES + copy).to(tl.int64)
        tl.store(row_scale + row, scale)
        tl.store(row_codes_ptr + row * total_c + cols, codes, mask=mask)


@Kernel
@triton.jit
def _combine_kernel(y_ptr, out_ptr, place_ptr, total_c, COPIES: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    mask = cols < total_c
    total = tl.zeros((SIZE,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(place_ptr + token * COPIES + copy).to(tl.int64)
        total += tl.load(y_ptr + row * total_c + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * total_c + cols, to_dtype(total, out_ptr.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _backward_rows_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, half, weight_ptr,
    blocks_ptr, blocks, column_fold, row_fold, row_codes, row_scale, column_amax, d_weight_ptr,
    KIND: tl.constexpr, SCALING: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of D and gradients of the routing weights for part of a block, and its column maxima."""
    GATED: tl.constexpr = up_ptr is not None
    sources = dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, weight_ptr
    expert, first, count = load_block(blocks_ptr, blocks, tl.program_id(0) // PARTS)
    part = tl.program_id(0) % PARTS * (ROWS * STEPS)
    if part < count:
        cols = tl.arange(0, SIZE)
        in_cols = inside(cols, half, EVEN)
        tiles = tiles_of(0, half, SIZE, EVEN)
        wide = 2 * half if GATED else half
        table = expert.to(tl.int64) * wide
        gate_fold = factors(None if row_fold is None else row_fold + table, cols, in_cols)[None, :]
        up_fold = gate_fold
        if GATED:
            up_fold = factors(None if row_fold is None else row_fold + table + half, cols, in_cols)[None, :]
        running = tl.zeros((ROWS, SIZE), tl.float32)
        up_running = running
        for step in tl.range(0, tl.minimum(tl.cdiv(count - part, ROWS), STEPS)):
            inner = part + step * ROWS + tl.arange(0, ROWS)
            in_rows, rows = inner < count, first + inner
            d_gate, d_up, h = gradients(sources, rows, cols, in_rows, in_cols, tiles, KIND)
            dh = load_tile(dh_ptr, dh_stride, rows, cols, in_rows, in_cols)
            tl.store(d_weight_ptr + rows, tl.sum(dh * h, axis=1), mask=in_rows)
            if row_codes is not None:
                store_halves(
                    d_gate * gate_fold, d_up * up_fold, row_codes, row_scale, wide, half, rows, cols, in_rows, in_cols,
                    SCALING, GATED,
                )  # fmt: skip
            if column_amax is not None:
                factor = factors(column_fold, rows, in_rows)[:, None]
                running = tl.maximum(running, finite_magnitude(d_gate * factor))
                if GATED:
                    up_running = tl.maximum(up_running, finite_magnitude(d_up * factor))
        if column_amax is not None:
            enter_maxima(running, column_amax + table, cols, in_cols)
            if GATED:
                enter_maxima(up_running, column_amax + table + half, cols, in_cols)


@triton.jit
def store_halves(
    gate, up, codes_ptr, scale_ptr, wide, half, rows, cols, in_rows, in_cols, SCALING: tl.constexpr, GATED: tl.constexpr
):
    """Quantise and store whole rows [gate | up], FP32, with one scale per row."""
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    found = amax(gate, 1)
    if GATED:
        found = tl.maximum(found, amax(up, 1))
    scale, inverse = scale_of(found, FORMAT, SCALING)
    tl.store(scale_ptr + rows, scale, mask=in_rows)
    codes_ptrs = codes_ptr + rows[:, None].to(tl.int64) * wide + cols[None, :]
    mask = in_rows[:, None] & in_cols[None, :]
    tl.store(codes_ptrs, to_codes(gate * inverse[:, None], FORMAT), mask=mask)
    if GATED:
        tl.store(codes_ptrs + half, to_codes(up * inverse[:, None], FORMAT), mask=mask)


@Kernel
@triton.jit
def _backward_columns_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, half, weight_ptr,
    blocks_ptr, blocks, column_fold, column_codes, column_inverse, hidden_codes, hidden_scale,
    KIND: tl.constexpr, ALIGNMENT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Transposed codes of D and h for a tile of padded positions."""
    GATED: tl.constexpr = up_ptr is not None
    across = tl.cdiv(half, WIDTH)
    tile_r, tile_c = tl.program_id(0) // across, tl.program_id(0) % across
    cols = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < half
    tiles = tiles_of(tile_c, half, WIDTH, False)
    expert, rows, in_rows = tile_of_block(blocks_ptr, blocks, tile_r, HEIGHT, ALIGNMENT)
    sources = dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, weight_ptr
    d_gate, d_up, h = gradients_of_quads(sources, rows, cols, in_rows, in_cols, tiles, KIND)
    total, everywhere = blocks * ALIGNMENT, in_rows[0] | True
    if column_codes is not None:
        fold, parts = factors_of_quads(column_fold, rows, in_rows), (d_gate, d_up)
        table = column_inverse + expert.to(tl.int64) * (2 * half if GATED else half)
        for part in tl.static_range(2 if GATED else 1):
            place = cols + part * half
            inverse = tl.load(table + part * half + cols, mask=in_cols, other=0.0)[None, :]
            words = pack(times(times_each(parts[part], fold), inverse), column_codes.dtype.element_ty)
            store_words(words, column_codes, total, place, in_cols, everywhere, tile_r)
    if hidden_codes is not None:
        s = factors_of_quads(hidden_scale, rows, in_rows)
        inverses = 1.0 / s[0], 1.0 / s[1], 1.0 / s[2], 1.0 / s[3]
        words = pack(times_each(h, inverses), hidden_codes.dtype.element_ty)
        store_words(words, hidden_codes, total, cols, in_cols, everywhere, tile_r)
