"""Octavo's FP8 GEMM with the search for the maxima of an activation's gradients as its epilogue, for Hopper.

A tile of dh is rounded to its dtype and stored, and, still in registers, multiplied out to d gate and d up, whose
magnitudes raise the maxima of D's rows and columns in memory. The pass that writes D's codes then needs no search
before it, which would read dh, gate and up once more: six bytes per element in place of four.

A tile is computed as an upper and a lower half, which share the loads of b: so few registers hold partial sums, and
the operands of the epilogue, that two programs are resident per SM. One multiplies while the other is in its epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation.triton import (
    folds_of,
    gated_gradients,
    gradient_outputs,
    value_and_slope,
    write_gradients,
)
from octavo.kernels.gemm.triton import (
    FAST,
    GROUP,
    SLOW,
    add_product,
    described,
    empty_sums,
    left_and_right,
    place_of,
    sm_count,
    sums_of,
)
from octavo.kernels.quant_spec import QuantSpec, contiguous_rows
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import INTERPRETED, factors, finite_magnitude, load_tile
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.output import Output, begin_searches, end_searches
from octavo.kernels.triton.shape import cdiv
from octavo.numerics import Quantized


class Config(NamedTuple):
    """Tile of dh and of the sum, warps, pipeline stages, and resident programs per SM."""

    height: int = 128
    width: int = 128
    depth: int = 128
    warps: int = 4
    stages: int = 3
    resident: int = 2
    halves: int = 2
    """Halves of a tile's rows, whose sums and epilogues are apart."""
    parts: int = 4
    """Parts of the columns of a half, whose epilogues are apart."""
    flatten: bool = True
    """Whether the loops over tiles and over the sum are fused."""
    prefetch: bool = True
    """Whether a program asks for its tile of gate and up before its products, so that they are in L2 after them."""


CONFIGS = {SLOW.value: Config(), FAST.value: Config(flatten=False)}
"""By `SUMS`."""


def gemm_activation_backward(
    g: Quantized,
    w: Quantized,
    accumulate: str,
    kind: str,
    gate: Tensor,
    up: Tensor,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """See `octavo.kernels.gemm_activation.gemm_activation_backward`."""
    gate, up = contiguous_rows(gate), contiguous_rows(up)
    dh = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    outputs = gradient_outputs(dh, True, targets, factors)
    begin_searches(*outputs)
    search_in_gemm(g, w, accumulate == "fast", kind, (dh, gate, up), outputs, factors)
    end_searches(*outputs)
    return write_gradients(kind, dh, gate, up, outputs, factors)


def search_in_gemm(
    g: Quantized,
    w: Quantized,
    fast: bool,
    kind: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    outputs: Sequence[Output],
    factors: Sequence[Tensor | None],
    config: Config | None = None,
) -> None:
    """Compute dh = g . w^T, and raise the maxima of the outputs D and D^T that search.

    Args:
        tensors: dh, contiguous, which is written; gate and up, whose rows may be apart in memory.
        config: launch configuration; by default that of `CONFIGS`.
    """
    (rows, depth), cols = g.codes.shape, w.codes.shape[0]
    dh, gate, up = tensors
    sums = sums_of(g.codes, fast)
    config = CONFIGS[sums] if config is None else config
    maxima = [output.inverse if output.searches else None for output in outputs[:2]]
    scales = g.scale.expand(rows, 1).contiguous(), w.scale.expand(cols, 1).contiguous()
    tiles, half = cdiv(rows, config.height) * cdiv(cols, config.width), config.height // config.halves
    _gemm_activation_kernel[(min(tiles, config.resident * sm_count(dh.device)),)](
        described(g.codes, half, config.depth), described(w.codes, config.width, config.depth), *scales,
        described(dh, half, config.width // config.parts),
        gate, up, gate.stride(0), up.stride(0), rows, cols, depth, *folds_of(factors), *maxima,
        KIND=kind, HEIGHT=config.height, WIDTH=config.width, DEPTH=config.depth, GROUP=GROUP, HALVES=config.halves,
        PARTS=config.parts, SUMS=sums, FLATTEN=config.flatten, PREFETCH=config.prefetch, STAGES=config.stages,
        num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _prefetch(x_ptr, stride, row, col, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Ask for a tile to be brought into L2, 64 elements at a time: at least a line of 128 bytes. No value waits."""
    rows = tl.minimum(row + tl.arange(0, HEIGHT), size[0] - 1)
    cols = tl.minimum(col + tl.arange(0, WIDTH // 64) * 64, size[1] - 1)
    addresses = (x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _raise_maxima(magnitude, axis: tl.constexpr, amax_ptr, index, mask):
    """Raise maxima in memory to those of a tile along an axis. Non-negative FP32 values order like their bits."""
    found = tl.maximum(tl.max(magnitude, axis=axis), 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + index, found, mask=mask, sem="relaxed")


@triton.jit
def _search_part(total, dh, row, col, size, operands, folds, maxima, KIND: tl.constexpr):
    """Store part of a tile of dh, and search the gradients of gate and up there.

    total: sums. size: rows and columns of dh. operands: scales of a and b, gate and up and their strides.
    """
    a_scale, b_scale, gate_ptr, up_ptr, gate_stride, up_stride = operands
    row_fold, column_fold = folds
    row_amax, column_amax = maxima
    rows, cols = row + tl.arange(0, total.shape[0]), col + tl.arange(0, total.shape[1])
    in_rows, in_cols = rows < size[0], cols < size[1]
    gate = load_tile(gate_ptr, gate_stride, rows, cols, in_rows, in_cols)
    up = load_tile(up_ptr, up_stride, rows, cols, in_rows, in_cols)
    row_scale = tl.load(a_scale + rows, mask=in_rows, other=0.0)
    col_scale = tl.load(b_scale + cols, mask=in_cols, other=0.0)
    rounded = to_dtype(total * row_scale[:, None] * col_scale[None, :], dh.dtype)
    dh.store([row, col], rounded)
    value, slope = value_and_slope(gate, KIND)
    d_gate, d_up, _ = gated_gradients(rounded.to(tl.float32), up, value, slope)
    if row_amax is not None:
        of_gate = finite_magnitude(d_gate * factors(row_fold, cols, in_cols)[None, :])
        of_up = finite_magnitude(d_up * factors(row_fold, cols + size[1], in_cols)[None, :])
        _raise_maxima(tl.maximum(of_gate, of_up), 1, row_amax, rows, in_rows)
    if column_amax is not None:
        factor = factors(column_fold, rows, in_rows)[:, None]
        _raise_maxima(finite_magnitude(d_gate * factor), 0, column_amax, cols, in_cols)
        _raise_maxima(finite_magnitude(d_up * factor), 0, column_amax, cols + size[1], in_cols)


@triton.jit
def _search_parts(total, dh, row, col, size, operands, folds, maxima, KIND: tl.constexpr, PARTS: tl.constexpr):
    """`_search_part`, by 1, 2 or 4 parts of the columns."""
    if PARTS == 1:
        _search_part(total, dh, row, col, size, operands, folds, maxima, KIND)
    else:
        WIDTH: tl.constexpr = total.shape[1] // PARTS
        left, right = left_and_right(total)
        if PARTS == 2:
            _search_part(left, dh, row, col, size, operands, folds, maxima, KIND)
            _search_part(right, dh, row, col + WIDTH, size, operands, folds, maxima, KIND)
        else:
            first, second = left_and_right(left)
            third, fourth = left_and_right(right)
            _search_part(first, dh, row, col, size, operands, folds, maxima, KIND)
            _search_part(second, dh, row, col + WIDTH, size, operands, folds, maxima, KIND)
            _search_part(third, dh, row, col + 2 * WIDTH, size, operands, folds, maxima, KIND)
            _search_part(fourth, dh, row, col + 3 * WIDTH, size, operands, folds, maxima, KIND)


@Kernel
@triton.jit
def _gemm_activation_kernel(
    a, b, a_scale, b_scale, dh, gate_ptr, up_ptr, gate_stride, up_stride, rows, cols, depth,
    row_fold, column_fold, row_amax, column_amax,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HALVES: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr, FLATTEN: tl.constexpr, PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of dh = a . b^T, and maxima of the gradients of gate and up."""
    HALF: tl.constexpr = HEIGHT // HALVES
    down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(cols, WIDTH)
    operands = a_scale, b_scale, gate_ptr, up_ptr, gate_stride, up_stride
    folds, maxima = (row_fold, column_fold), (row_amax, column_amax)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLATTEN):
        down_by, across_by = place_of(tile, down, across, GROUP)
        row, col = down_by * HEIGHT, across_by * WIDTH
        if PREFETCH and not INTERPRETED:
            _prefetch(gate_ptr, gate_stride, row, col, (rows, cols), HEIGHT, WIDTH)
            _prefetch(up_ptr, up_stride, row, col, (rows, cols), HEIGHT, WIDTH)
        upper = empty_sums(HALF, WIDTH, SUMS)
        lower = empty_sums(HALF, WIDTH, SUMS)
        for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
            w = b.load([col, k]).T
            upper = add_product(upper, a.load([row, k]), w, SUMS)
            if HALVES == 2:
                lower = add_product(lower, a.load([row + HALF, k]), w, SUMS)
        _search_parts(upper, dh, row, col, (rows, cols), operands, folds, maxima, KIND, PARTS)
        if HALVES == 2:
            _search_parts(lower, dh, row + HALF, col, (rows, cols), operands, folds, maxima, KIND, PARTS)
