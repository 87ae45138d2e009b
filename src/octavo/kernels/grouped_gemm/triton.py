"""Grouped GEMMs with row scales, for Hopper: FP8, and INT8 whose sums are exact.

Products are accumulated as `SUMS` says (`octavo.kernels.gemm.triton`). A tile of FP8 is computed as an upper and a
lower half, which share the loads of b: so few registers hold partial sums that two programs are resident per SM, and
one multiplies while the other accumulates or stores its tile. At 1,024 tokens per expert and 2048 x 768 weights this is
as fast as PyTorch's grouped GEMM with fast accumulation, and three times as fast as PyTorch's with slow accumulation,
whose results it equals bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gemm.triton import (
    FAST,
    INTEGER,
    SLOW,
    add_product,
    described,
    empty_sums,
    left_and_right,
    sm_count,
    sums_of,
)
from octavo.kernels.grouped.triton import blocks_of, load_block
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv

TILE = 128
"""Block size along M, N and K. The rows of a tile belong to one group."""
RESIDENT = 2
"""Resident programs per SM; they are persistent, each computing tile after tile."""
META = {"num_warps": 4, "STAGES": 3, "TILE": TILE}


def grouped_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, ends: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a[t] . b[e(t)]^T, (T, R)."""
    y = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    blocks, sums = blocks_of(ends, a.shape[0], 0), sums_of(a, fast)
    kernel, height = (_grouped_integer_kernel, TILE) if sums == INTEGER.value else (_grouped_gemm_kernel, TILE // 2)
    kernel[programs(blocks.total * cdiv(b.shape[1], TILE), a.device)](
        described(a, height, TILE), described(b, TILE, TILE), a_scale.contiguous(), contiguous(b_scale), y,
        blocks.table, blocks.total, blocks.starts, len(ends), b.shape[1], a.shape[1], SUMS=sums, **META,
    )  # fmt: skip
    return y


def grouped_wgrad(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return the products (E, N, K) of the groups of a (N, P) and b (K, P). ends: ends of the unpadded groups."""
    experts, rows, cols = len(ends), a.shape[0], b.shape[0]
    dw = torch.empty(experts, rows, cols, dtype=out_dtype, device=a.device)
    _grouped_gemm_sums_kernel[programs(experts * cdiv(rows, TILE) * cdiv(cols, TILE), a.device)](
        described(a, TILE // 2, TILE), described(b, TILE, TILE), a_scale.contiguous(), contiguous(b_scale), dw,
        blocks_of(ends, 0).starts, experts, rows, cols, **META,
    )  # fmt: skip
    return dw


def contiguous(scale: Tensor | None) -> Tensor | None:
    """Return contiguous scales, or None."""
    return None if scale is None else scale.contiguous()


def programs(tiles: int, device: torch.device) -> tuple[int]:
    """Return the grid of persistent programs for `tiles` tiles."""
    return (min(tiles, RESIDENT * sm_count(device)),)


@triton.jit
def _store(total, row_scale, col_scale, out_ptr, width, rows, cols, in_rows, in_cols):
    """Store half a tile, multiplied by its row and column scales."""
    y = total.to(tl.float32) * tl.load(row_scale + rows, mask=in_rows, other=0.0)[:, None]
    if col_scale is not None:
        y *= tl.load(col_scale + cols, mask=in_cols, other=0.0)[None, :]
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * width + cols[None, :]
    tl.store(out_ptrs, to_dtype(y, out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@Kernel
@triton.jit
def _grouped_gemm_kernel(
    a, b, a_scale, b_scale, out_ptr, table_ptr, blocks, starts_ptr, experts, width, depth,
    SUMS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of the product of each group: contracts the `depth` columns of a and b.

    `flatten` fuses both loops, so that the first loads of a tile overlap the store of the previous one; but not if
    FAST, as the tensor cores would wait for each other.
    """
    HALF: tl.constexpr = TILE // 2
    across = tl.cdiv(width, TILE)
    tiles = tl.load(starts_ptr + experts) * across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=SUMS != FAST):
        expert, first, count = load_block(table_ptr, blocks, tile // across)
        col = tile % across * TILE
        upper = empty_sums(HALF, TILE, SUMS)
        lower = empty_sums(HALF, TILE, SUMS)
        for k in tl.range(0, depth, TILE, num_stages=STAGES):
            w = tl.reshape(b.load([expert, col, k]), (TILE, TILE)).T
            upper = add_product(upper, a.load([first, k]), w, SUMS)
            lower = add_product(lower, a.load([first + HALF, k]), w, SUMS)
        inner, cols = tl.arange(0, HALF), col + tl.arange(0, TILE)
        in_cols = cols < width
        scale = b_scale
        if b_scale is not None:
            scale += expert.to(tl.int64) * width
        _store(upper, a_scale, scale, out_ptr, width, first + inner, cols, inner < count, in_cols)
        inner += HALF
        _store(lower, a_scale, scale, out_ptr, width, first + inner, cols, inner < count, in_cols)


@Kernel
@triton.jit
def _grouped_integer_kernel(
    a, b, a_scale, b_scale, out_ptr, table_ptr, blocks, starts_ptr, experts, width, depth,
    SUMS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_grouped_gemm_kernel` for INT8, by whole tiles: there are no partial sums beside their total."""
    across = tl.cdiv(width, TILE)
    tiles = tl.load(starts_ptr + experts) * across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        expert, first, count = load_block(table_ptr, blocks, tile // across)
        col = tile % across * TILE
        total = empty_sums(TILE, TILE, SUMS)
        for k in tl.range(0, depth, TILE, num_stages=STAGES):
            w = tl.reshape(b.load([expert, col, k]), (TILE, TILE)).T
            total = add_product(total, a.load([first, k]), w, SUMS)
        inner, cols = tl.arange(0, TILE), col + tl.arange(0, TILE // 2)
        scale = b_scale
        if b_scale is not None:
            scale += expert.to(tl.int64) * width
        left, right = left_and_right(total)
        _store(left, a_scale, scale, out_ptr, width, first + inner, cols, inner < count, cols < width)
        cols += TILE // 2
        _store(right, a_scale, scale, out_ptr, width, first + inner, cols, inner < count, cols < width)


@Kernel
@triton.jit
def _grouped_gemm_sums_kernel(
    a, b, a_scale, b_scale, out_ptr, starts_ptr, experts, height, width, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """Tiles of the product of each group: contracts its columns of a and b, which are padded to multiples of TILE."""
    HALF: tl.constexpr = TILE // 2
    across, down = tl.cdiv(width, TILE), tl.cdiv(height, TILE)
    for tile in tl.range(tl.program_id(0), experts * across * down, tl.num_programs(0)):
        expert = tile // (across * down)
        row, col = tile % (across * down) // across * TILE, tile % across * TILE
        start, end = tl.load(starts_ptr + expert) * TILE, tl.load(starts_ptr + expert + 1) * TILE
        upper = empty_sums(HALF, TILE, SLOW)
        lower = empty_sums(HALF, TILE, SLOW)
        for k in tl.range(start, end, TILE, num_stages=STAGES):
            w = b.load([col, k]).T
            upper = add_product(upper, a.load([row, k]), w, SLOW)
            lower = add_product(lower, a.load([row + HALF, k]), w, SLOW)
        rows, cols = row + tl.arange(0, HALF), col + tl.arange(0, TILE)
        in_cols = cols < width
        scale = b_scale
        if b_scale is not None:
            scale += expert.to(tl.int64) * width
        scales, place = a_scale + expert.to(tl.int64) * height, out_ptr + expert.to(tl.int64) * height * width
        _store(upper, scales, scale, place, width, rows, cols, rows < height, in_cols)
        rows += HALF
        _store(lower, scales, scale, place, width, rows, cols, rows < height, in_cols)
