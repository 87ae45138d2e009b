"""Quantise and transpose tokens per group, with the group sizes on the device only.

Programs process *blocks*: `ALIGNMENT` padded positions of one expert. A first kernel tabulates the expert, first token
and token count of each block. One read of whole rows gives row codes and column maxima; a second pass writes the
transpose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.grouped.padding import ALIGNMENT, padded_length
from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty
from octavo.kernels.triton.codes import (
    amax,
    factors,
    factors_of_quads,
    finite_magnitude,
    inside,
    load_quads,
    load_tile,
    load_words,
    pack,
    quads,
    scale_of,
    source_rows,
    store_words,
    times,
    times_each,
    to_codes,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.output import end_search
from octavo.kernels.triton.shape import Rows, Shape, cdiv, next_power_of_2

STRIP = 64
"""Rows of a block per program, in kernels that hold whole rows."""
ROWS = Rows(4096, 32)
WRITE = Shape(64, 128, warps=8)
TRANSPOSE = Shape(ALIGNMENT, 64, warps=4)
_COMPARED = 8192
"""Pairs of block and expert that one program of `_blocks_kernel` compares."""


class ColumnOutput(NamedTuple):
    """Buffers of codes (C, P), their scales (E, C), and the maxima (E, C) of a search."""

    codes: Tensor
    scale: Tensor
    amax: Tensor

    @classmethod
    def of(cls, target: QuantSpec, cols: int, ends: Tensor, tokens: int) -> ColumnOutput:
        """Allocate the buffers, with zeros for maxima."""
        experts, device = len(ends), ends.device
        codes = torch.empty(cols, padded_length(tokens, experts), dtype=target.fmt.dtype, device=device)
        scale = torch.empty(experts, cols, dtype=torch.float32, device=device)
        return cls(codes, scale, torch.zeros_like(scale))

    def end_search(self, target: QuantSpec) -> None:
        """Compute the scales, and overwrite the maxima with the inverse scales."""
        end_search((self.amax, self.scale, target.format == "e4m3", target.rule))


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
    tokens, cols = len(x if source is None else source), x.shape[1]
    row_fold, column_fold = (fold if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    blocks = blocks_of(ends, tokens)
    row = None if rows is None else empty(rows, tokens, cols, x.device)
    column = None if columns is None else ColumnOutput.of(columns, cols, ends, tokens)
    _group_rows_kernel[(blocks.total * (ALIGNMENT // STRIP),)](
        x, x.stride(0), cols, source, blocks.table, blocks.total, row_fold, column_fold,
        *((None, None) if row is None else row[:2]), None if column is None else column.amax,
        SCALING=0 if rows is None else rows.rule, **strips(ROWS, cols),
    )  # fmt: skip
    if columns is None or column is None:
        return None if row is None else (row.codes, row.scale), None
    column.end_search(columns)
    across, down = WRITE.grid(column.codes.shape[1], cols)
    _group_columns_kernel[(across * down,)](
        x, x.stride(0), cols, column.codes.shape[1], source, blocks.table, blocks.total, column_fold,
        column.codes, column.amax, ALIGNMENT=ALIGNMENT, **WRITE.meta(),
    )  # fmt: skip
    return None if row is None else (row.codes, row.scale), (column.codes, column.scale)


def transpose_groups(codes: Tensor, ends: Tensor, source: Tensor | None = None) -> Tensor:
    """See `octavo.kernels.grouped.transpose_groups`."""
    codes = codes.contiguous()
    tokens, cols = len(codes if source is None else source), codes.shape[1]
    blocks = blocks_of(ends, tokens)
    out = torch.empty(cols, padded_length(tokens, len(ends)), dtype=codes.dtype, device=codes.device)
    _group_transpose_kernel[TRANSPOSE.grid(out.shape[1], cols)](
        codes.view(torch.uint8), out.view(torch.uint8), cols, out.shape[1], source, blocks.table, blocks.total,
        **TRANSPOSE.meta(),
    )  # fmt: skip
    return out


def strips(rows: Rows, cols: int) -> dict[str, Any]:
    """Return the meta-parameters of a kernel whose programs loop over the whole rows of part of a block."""
    meta = rows.meta(STRIP, cols)
    return {**meta, "STEPS": STRIP // meta["ROWS"], "PARTS": ALIGNMENT // STRIP, "enable_fp_fusion": False}


class Blocks(NamedTuple):
    """Tokens of each block of padded positions, int32."""

    table: Tensor
    """(3, P / ALIGNMENT): expert, first token and token count per block; count 0 after the last group."""
    starts: Tensor
    """(E + 1,): first block of each expert, and the end of the last one's."""

    @property
    def total(self) -> int:
        """Number of blocks allocated."""
        return self.table.shape[1]


def blocks_of(ends: Tensor, tokens: int, least: int = 1) -> Blocks:
    """Return the blocks of `tokens` tokens. least: blocks of an expert without tokens, 1 for padded positions."""
    experts = len(ends)
    size, count = next_power_of_2(experts), padded_length(tokens, experts) // ALIGNMENT
    table = torch.empty(3, count, dtype=torch.int32, device=ends.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ends.device)
    each = max(_COMPARED // size, 1)
    _blocks_kernel[(cdiv(count, each),)](
        ends.contiguous(),
        table,
        starts,
        experts,
        count,
        ALIGNMENT=ALIGNMENT,
        LEAST=least,
        EACH=each,
        SIZE=size,
        num_warps=4,
    )
    return Blocks(table, starts)


@Kernel
@triton.jit
def _blocks_kernel(
    ends_ptr, table_ptr, starts_ptr, experts, total,
    ALIGNMENT: tl.constexpr, LEAST: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    every = tl.arange(0, SIZE)
    mask = every < experts
    end = tl.load(ends_ptr + every, mask=mask, other=0)
    start = tl.load(ends_ptr + every - 1, mask=mask & (every > 0), other=0)
    until = tl.cumsum(tl.where(mask, tl.maximum(tl.cdiv(end - start, ALIGNMENT), LEAST), 0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr, 0)
        tl.store(starts_ptr + 1 + every, until, mask=mask)
    block = tl.program_id(0) * EACH + tl.arange(0, EACH)
    before = (until[None, :] <= block[:, None]) & mask[None, :]
    expert = tl.sum(before.to(tl.int32), axis=1)
    offset = block - tl.max(tl.where(before, until[None, :], 0), axis=1)
    first = tl.max(tl.where(before, end[None, :], 0), axis=1) + offset * ALIGNMENT
    stop = tl.load(ends_ptr + expert, mask=expert < experts, other=0)
    count = tl.minimum(tl.maximum(stop - first, 0), ALIGNMENT)
    tl.store(table_ptr + block, tl.minimum(expert, experts - 1), mask=block < total)
    tl.store(table_ptr + total + block, first, mask=block < total)
    tl.store(table_ptr + 2 * total + block, count, mask=block < total)


@triton.jit
def load_block(blocks_ptr, total, block):
    """Load the expert of a block, its first token and its token count."""
    return tl.load(blocks_ptr + block), tl.load(blocks_ptr + total + block), tl.load(blocks_ptr + 2 * total + block)


@triton.jit
def store_rows(x, codes_ptr, scale_ptr, total_c, rows, cols, in_rows, in_cols, SCALING: tl.constexpr):
    """Quantise and store whole rows, FP32, with one scale per row."""
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    scale, inverse = scale_of(amax(x, 1), FORMAT, SCALING)
    tl.store(scale_ptr + rows, scale, mask=in_rows)
    codes_ptrs = codes_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :]
    tl.store(codes_ptrs, to_codes(x * inverse[:, None], FORMAT), mask=in_rows[:, None] & in_cols[None, :])


@triton.jit
def enter_maxima(running, amax_ptr, cols, in_cols):
    """Atomic max of column maxima into memory; non-negative FP32 values order like their bits."""
    found = tl.max(running, axis=0)
    amax_ptrs = amax_ptr.to(tl.pointer_type(tl.int32)) + cols
    tl.atomic_max(amax_ptrs, found.to(tl.int32, bitcast=True), mask=in_cols & (found > 0.0), sem="relaxed")


@Kernel
@triton.jit
def _group_rows_kernel(
    x_ptr, stride, total_c, source_ptr, blocks_ptr, blocks, row_fold, column_fold, row_codes, row_scale, column_amax,
    SCALING: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Row codes of part of a block, and its column maxima."""
    expert, first, count = load_block(blocks_ptr, blocks, tl.program_id(0) // PARTS)
    part = tl.program_id(0) % PARTS * (ROWS * STEPS)
    if part < count:
        cols = tl.arange(0, SIZE)
        in_cols = inside(cols, total_c, EVEN)
        fold = tl.full((SIZE,), 1.0, tl.float32)
        if row_fold is not None:
            fold = tl.load(row_fold + expert.to(tl.int64) * total_c + cols, mask=in_cols, other=1.0)
        running = tl.zeros((ROWS, SIZE), tl.float32)
        for step in tl.range(0, tl.minimum(tl.cdiv(count - part, ROWS), STEPS)):
            inner = part + step * ROWS + tl.arange(0, ROWS)
            in_rows, rows = inner < count, first + inner
            x = load_tile(x_ptr, stride, source_rows(source_ptr, rows, in_rows), cols, in_rows, in_cols)
            if row_codes is not None:
                store_rows(x * fold[None, :], row_codes, row_scale, total_c, rows, cols, in_rows, in_cols, SCALING)
            if column_amax is not None:
                magnitude = finite_magnitude(x * factors(column_fold, rows, in_rows)[:, None])
                running = tl.maximum(running, magnitude)
        if column_amax is not None:
            enter_maxima(running, column_amax + expert.to(tl.int64) * total_c, cols, in_cols)


@triton.jit
def tile_of_block(blocks_ptr, blocks, tile_r, HEIGHT: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Expert of a tile of padded positions, its tokens in four quarters as in `codes.quads`, and their masks."""
    expert, first, count = load_block(blocks_ptr, blocks, tile_r * HEIGHT // ALIGNMENT)
    inner, _ = quads(tile_r % (ALIGNMENT // HEIGHT), 0, HEIGHT, True)
    in_rows = inner[0] < count, inner[1] < count, inner[2] < count, inner[3] < count
    return expert, (first + inner[0], first + inner[1], first + inner[2], first + inner[3]), in_rows


@Kernel
@triton.jit
def _group_columns_kernel(
    x_ptr, stride, total_c, total_r, source_ptr, blocks_ptr, blocks, column_fold, column_codes, column_inverse,
    ALIGNMENT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Transposed codes of a tile of padded positions."""
    across = tl.cdiv(total_c, WIDTH)
    tile_r, tile_c = tl.program_id(0) // across, tl.program_id(0) % across
    cols = tile_c * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    expert, rows, in_rows = tile_of_block(blocks_ptr, blocks, tile_r, HEIGHT, ALIGNMENT)
    inverse = tl.load(column_inverse + expert.to(tl.int64) * total_c + cols, mask=in_cols, other=0.0)[None, :]
    x = load_quads(x_ptr, stride, source_ptr, rows, cols, in_rows, in_cols)
    y = times(times_each(x, factors_of_quads(column_fold, rows, in_rows)), inverse)
    words = pack(y, column_codes.dtype.element_ty)
    store_words(words, column_codes, total_r, cols, in_cols, in_rows[0] | True, tile_r)


@Kernel
@triton.jit
def _group_transpose_kernel(
    x_ptr, out_ptr, total_c, total_r, source_ptr, blocks_ptr, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    _, rows, in_rows = tile_of_block(blocks_ptr, blocks, tl.program_id(1), HEIGHT, HEIGHT)
    words = load_words(x_ptr, total_c, source_ptr, rows, cols, in_rows, in_cols)
    store_words(words, out_ptr, total_r, cols, in_cols, in_rows[0] | True, tl.program_id(1))
