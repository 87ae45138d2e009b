"""INT8 GEMM with scales per row and column, for GPUs with TMA (Hopper).

    y[m, n] = (sum over k of a[m, k] b[n, k]) * a_scale[m] * b_scale[n]

Sums are INT32 and exact: the result depends on neither tile size nor order, and equals the reference bit for bit.
Programs are persistent. `flatten` fuses the loops over tiles and over K, so that the first loads of a tile overlap the
epilogue of the one before. Tiles are walked in columns of `GROUP` rows of tiles, whose operands stay in L2.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv


class Config(NamedTuple):
    """Tile of the result and of K, warps, pipeline stages, resident programs per SM, and parts of a tile's epilogue."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    resident: int = 1
    parts: int = 1


CONFIG = Config(128, 128, 128, warps=4, stages=3, resident=2, parts=2)
"""Tuned on an H200. Two programs per SM: one multiplies while the other stores its tile."""
GROUP = 8
"""Rows of tiles that are walked together."""
ALIGNED = 16
"""Alignment of K in elements: TMA wants rows of a multiple of 16 bytes."""


def integer_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, config: Config = CONFIG
) -> Tensor:
    """Return a . b^T times its scales, (M, N).

    Args:
        a: INT8 (M, K), contiguous, K a multiple of `ALIGNED`.
        a_scale: FP32 (M, 1), contiguous.
        b: INT8 (N, K), contiguous; N times the size of `out_dtype` is a multiple of 16 bytes.
        b_scale: FP32 (N, 1), contiguous.
        out_dtype: BF16, FP16 or FP32.
    """
    (rows, depth), cols = a.shape, b.shape[0]
    y = torch.empty(rows, cols, dtype=out_dtype, device=a.device)
    tiles = cdiv(rows, config.height) * cdiv(cols, config.width)
    _integer_gemm_kernel[(min(tiles, config.resident * sm_count(a.device)),)](
        described(a, config.height, config.depth), described(b, config.width, config.depth), a_scale, b_scale,
        described(y, config.height, config.width // config.parts), rows, cols, depth,
        HEIGHT=config.height, WIDTH=config.width, DEPTH=config.depth, GROUP=GROUP, PARTS=config.parts,
        num_warps=config.warps, STAGES=config.stages,
    )  # fmt: skip
    return y


@cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 without a GPU, in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def described(x: Tensor, height: int, width: int) -> TensorDescriptor:
    """Return a descriptor of a contiguous matrix that moves tiles (height, width); out of bounds, zeros are read."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [height, width])


@triton.jit
def _store_part(total, row_scale, b_scale, y, row, col, cols, width):
    """Store part of a tile, INT32, multiplied by its scales."""
    index = col + tl.arange(0, width)
    col_scale = tl.load(b_scale + index, mask=index < cols, other=0.0)
    scaled = total.to(tl.float32) * row_scale[:, None] * col_scale[None, :]
    y.store([row, col], to_dtype(scaled, y.dtype))


@triton.jit
def _integer_gemm_kernel(
    a, b, a_scale, b_scale, y, rows, cols, depth,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(cols, WIDTH)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        inner = tile % (GROUP * across)
        row, col = (first + inner % height) * HEIGHT, inner // height * WIDTH
        total = tl.zeros((HEIGHT, WIDTH), tl.int32)
        for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
            total = tl.dot(a.load([row, k]), b.load([col, k]).T, total, out_dtype=tl.int32)
        index = row + tl.arange(0, HEIGHT)
        row_scale = tl.load(a_scale + index, mask=index < rows, other=0.0)
        if PARTS == 1:
            _store_part(total, row_scale, b_scale, y, row, col, cols, WIDTH)
        else:
            halves = tl.permute(tl.reshape(total, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store_part(left, row_scale, b_scale, y, row, col, cols, WIDTH // 2)
            _store_part(right, row_scale, b_scale, y, row, col + WIDTH // 2, cols, WIDTH // 2)


_integer_gemm_kernel = Kernel(_integer_gemm_kernel)
