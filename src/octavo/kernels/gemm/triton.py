"""Octavo's own GEMM with scales per row and column, for GPUs with TMA (Hopper): INT8, and E4M3.

    y[m, n] = (sum over k of a[m, k] b[n, k]) * a_scale[m] * b_scale[n]

`SUMS` says how products are accumulated; the rest of the kernel is the same:

    INTEGER   INT8, in INT32: exact, so that the result depends on neither tile size nor order, and equals the
              reference bit for bit
    SLOW      E4M3: tensor cores accumulate the `depth` products of a tile alone, of which Hopper's keep about 14 bits,
              and these partial sums are accumulated in FP32
    FAST      E4M3: tensor cores accumulate all products

The last step of a tile is a function, `epilogue`: it gets the scaled sums in FP32, and stores what becomes of them.

Programs are persistent. `flatten` fuses the loops over tiles and over K, so that the first loads of a tile overlap the
epilogue of the one before; but not if FAST, as the tensor cores would wait for each other. Tiles are walked in columns
of `GROUP` rows of tiles, whose operands stay in L2.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv

INTEGER, SLOW, FAST = (tl.constexpr(i) for i in range(3))


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
"""Tuned on an H200 for INT8. Two programs per SM: one multiplies while the other stores its tile."""
CONFIGS = {INTEGER.value: CONFIG, SLOW.value: Config(128, 128, 128, warps=8, stages=4), FAST.value: CONFIG}
"""By `SUMS`. SLOW holds two tiles of FP32, partial sums and their total: eight warps have the registers. Untuned for
E4M3, of which cuBLAS's GEMM is the default."""
GROUP = 8
"""Rows of tiles that are walked together."""
ALIGNED = 16
"""Alignment of K in elements: TMA wants rows of a multiple of 16 bytes."""


@triton.jit
def store_rounded(scaled, y, row, col):
    """The default epilogue: round the scaled sums of a tile, FP32, to the dtype of y (M, N), and store them."""
    y.store([row, col], to_dtype(scaled, y.dtype))


def scaled_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    *,
    fast: bool = False,
    epilogue: Any = store_rounded,
    config: Config | None = None,
) -> Tensor:
    """Return a . b^T times its scales, (M, N).

    Args:
        a: INT8 or E4M3 (M, K), contiguous, K a multiple of `ALIGNED`.
        a_scale: FP32 (M, 1), contiguous.
        b: (N, K) of a's dtype, contiguous; N times the size of `out_dtype` is a multiple of 16 bytes.
        b_scale: FP32 (N, 1), contiguous.
        out_dtype: BF16, FP16 or FP32.
        fast: accumulate E4M3 in the tensor cores. Sums of INT8 are exact either way.
        epilogue: Triton function of a part of a tile, FP32 (height, width / parts); the descriptor of y, which stores
            tiles of this size; and the row and column of the part in y.
        config: launch configuration; by default that of `CONFIGS`.
    """
    (rows, depth), cols = a.shape, b.shape[0]
    sums = sums_of(a, fast)
    config = CONFIGS[sums] if config is None else config
    y = torch.empty(rows, cols, dtype=out_dtype, device=a.device)
    tiles = cdiv(rows, config.height) * cdiv(cols, config.width)
    _gemm_kernel[(min(tiles, config.resident * sm_count(a.device)),)](
        described(a, config.height, config.depth), described(b, config.width, config.depth), a_scale, b_scale,
        described(y, config.height, config.width // config.parts), rows, cols, depth,
        HEIGHT=config.height, WIDTH=config.width, DEPTH=config.depth, GROUP=GROUP, PARTS=config.parts,
        SUMS=sums, EPILOGUE=epilogue, num_warps=config.warps, STAGES=config.stages,
    )  # fmt: skip
    return y


def sums_of(codes: Tensor, fast: bool) -> int:
    """Return how products of these codes are accumulated: INTEGER, SLOW or FAST."""
    if codes.dtype == torch.int8:
        return int(INTEGER.value)
    return int(FAST.value if fast else SLOW.value)


@cache
def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 without a GPU, in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def described(x: Tensor, height: int, width: int) -> TensorDescriptor:
    """Return a descriptor that moves tiles (height, width) of the last two dimensions; out of bounds, zeros are read.

    x: its last dimension is contiguous.
    """
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [*[1] * (x.dim() - 2), height, width])


@triton.jit
def empty_sums(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr):
    """Sums of no products."""
    return tl.zeros((HEIGHT, WIDTH), tl.int32 if SUMS == INTEGER else tl.float32)


@triton.jit
def add_product(total, x, w, SUMS: tl.constexpr):
    """total + x w, accumulated as `SUMS` says."""
    if SUMS == INTEGER:
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    elif SUMS == FAST:
        total = tl.dot(x, w, total)
    else:
        total += tl.dot(x, w)
    return total


@triton.jit
def left_and_right(total):
    """Two halves of a tile, by columns: fewer registers hold what is stored."""
    HEIGHT: tl.constexpr = total.shape[0]
    WIDTH: tl.constexpr = total.shape[1]
    return tl.split(tl.permute(tl.reshape(total, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _finish(total, row_scale, b_scale, y, row, col, cols, EPILOGUE: tl.constexpr):
    """Multiply part of a tile by its scales, and store it."""
    index = col + tl.arange(0, total.shape[1])
    col_scale = tl.load(b_scale + index, mask=index < cols, other=0.0)
    EPILOGUE(total.to(tl.float32) * row_scale[:, None] * col_scale[None, :], y, row, col)


@triton.jit
def _gemm_kernel(
    a, b, a_scale, b_scale, y, rows, cols, depth,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    SUMS: tl.constexpr, EPILOGUE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(cols, WIDTH)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=SUMS != FAST):
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        inner = tile % (GROUP * across)
        row, col = (first + inner % height) * HEIGHT, inner // height * WIDTH
        total = empty_sums(HEIGHT, WIDTH, SUMS)
        for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
            total = add_product(total, a.load([row, k]), b.load([col, k]).T, SUMS)
        index = row + tl.arange(0, HEIGHT)
        row_scale = tl.load(a_scale + index, mask=index < rows, other=0.0)
        if PARTS == 1:
            _finish(total, row_scale, b_scale, y, row, col, cols, EPILOGUE)
        else:
            left, right = left_and_right(total)
            _finish(left, row_scale, b_scale, y, row, col, cols, EPILOGUE)
            _finish(right, row_scale, b_scale, y, row, col + WIDTH // 2, cols, EPILOGUE)


_gemm_kernel = Kernel(_gemm_kernel)
