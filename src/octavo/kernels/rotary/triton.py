"""Rotation of channel pairs: a row is the channels of one head, a program holds several. Tables stay in the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv, next_power_of_2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor:
    """See `octavo.kernels.rotary.rotate`; the tables are (1 or B, T, E/2 or E)."""
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    batch, length, heads, width = x.shape
    y = x.new_empty(x.shape)
    rows, size = batch * length * heads, next_power_of_2(width // 2)
    height = max(1024 // size, 1)
    # The last is the offset of the columns for the second half of the channels.
    cos_strides, sin_strides = (
        (0 if t.shape[0] == 1 else t.stride(0), t.stride(1), t.shape[2] - width // 2) for t in (cos, sin)
    )
    _rotate_kernel[(cdiv(rows, height),)](
        x, *x.stride()[:3], cos, *cos_strides, sin, *sin_strides, y, rows, length, heads, width // 2,
        CONJUGATE=conjugate, ROWS=height, SIZE=size, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y


@Kernel
@triton.jit
def _rotate_kernel(
    x_ptr, stride_b, stride_t, stride_h, cos_ptr, cos_b, cos_t, cos_2, sin_ptr, sin_b, sin_t, sin_2,
    y_ptr, total, length, heads, half, CONJUGATE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Without FMAs, results equal the reference's bit for bit."""
    rows, pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
    mask = (rows < total)[:, None] & (pairs < half)
    token, head = rows // heads, rows % heads
    batch, time = (token // length).to(tl.int64), (token % length).to(tl.int64)
    x_ptrs = x_ptr + (batch * stride_b + time * stride_t + head.to(tl.int64) * stride_h)[:, None] + pairs
    first, second = _load(x_ptrs, mask), _load(x_ptrs + half, mask)
    cos_ptrs = cos_ptr + (batch * cos_b + time * cos_t)[:, None] + pairs
    sin_ptrs = sin_ptr + (batch * sin_b + time * sin_t)[:, None] + pairs
    cos1, cos2 = _load(cos_ptrs, mask), _load(cos_ptrs + cos_2, mask)
    sin1, sin2 = _load(sin_ptrs, mask), _load(sin_ptrs + sin_2, mask)
    if CONJUGATE:
        sin1, sin2 = -sin2, -sin1
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * (2 * half) + pairs
    tl.store(y_ptrs, to_dtype(first * cos1 - second * sin1, y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + half, to_dtype(second * cos2 + first * sin2, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
