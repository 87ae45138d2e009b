"""The byte transpose. Codes move as plain bytes: no FP8 value is looked at."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose (C, R) of contiguous codes (R, C)."""
    rows, cols = codes.shape
    out = torch.empty(cols, rows, dtype=codes.dtype, device=codes.device)
    height, width = 128, 256
    grid = (triton.cdiv(cols, width), triton.cdiv(rows, height))
    _transpose_kernel[grid](
        codes.view(torch.uint8), out.view(torch.uint8), rows, cols, HEIGHT=height, WIDTH=width, num_warps=8
    )
    return out


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, total_r, total_c, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_rows, in_cols = rows < total_r, cols < total_c
    x = tl.load(
        x_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :], mask=in_rows[:, None] & in_cols[None, :], other=0
    )
    where = out_ptr + cols[:, None].to(tl.int64) * total_r + rows[None, :]
    tl.store(where, tl.trans(x), mask=in_cols[:, None] & in_rows[None, :])
