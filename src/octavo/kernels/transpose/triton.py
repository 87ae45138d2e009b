"""Byte transpose: codes move as plain bytes and are never decoded.

Four vertically adjacent codes are contiguous in the transpose. A thread loads them from four rows and stores them as
one word: the exchange between threads, the cost of a transpose, then has a quarter of the elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.codes import inside, load_words, quads, store_words
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Shape

SHAPE = Shape(128, 64, warps=4)


def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the transpose (C, R) of contiguous codes (R, C). after: see `octavo.kernels.transpose`."""
    return _launch(codes, after, None)


def transpose_folded(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transpose, and a scale of 1 per row, FP32 (C, 1)."""
    scale = torch.empty(codes.shape[1], 1, dtype=torch.float32, device=codes.device)
    return _launch(codes, after, scale), scale


def _launch(codes: Tensor, after: Tensor | None, scale: Tensor | None) -> Tensor:
    rows, cols = codes.shape
    surplus = -rows % 4
    out = torch.empty(cols, rows + surplus, dtype=codes.dtype, device=codes.device)
    TRANSPOSE[SHAPE.grid(rows, cols)](
        codes.view(torch.uint8), out.view(torch.uint8), scale, after, rows, cols,
        EVEN=SHAPE.strip(rows, cols)["EVEN"], HEIGHT=SHAPE.height, WIDTH=SHAPE.width, num_warps=SHAPE.warps,
    )  # fmt: skip
    return out[:, :rows].contiguous() if surplus else out


@triton.jit
def transpose_tile(
    x_ptr, out_ptr, scale_ptr, after, total_r, total_c, EVEN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One tile per program. `after` is not read: it tells a compiler which launch this one depends on."""
    rows, in_rows = quads(tl.program_id(1), total_r, HEIGHT, EVEN)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(cols, total_c, EVEN)
    if scale_ptr is not None:
        tl.store(scale_ptr + cols, tl.full((WIDTH,), 1.0, tl.float32), mask=in_cols & (tl.program_id(1) == 0))
    words = load_words(x_ptr, total_c, None, rows, cols, in_rows, in_cols)
    store_words(words, out_ptr, total_r, cols, in_cols, in_rows[0], tl.program_id(1))


TRANSPOSE = Kernel(transpose_tile)
