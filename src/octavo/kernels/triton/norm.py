"""RMS norm and layer norm: a program holds whole rows, so that one read gives y, its statistics and its codes.

Backward, a fixed number of programs walk over all rows. Each keeps its share of the sums over rows in registers and
writes it once, so that dy and x are read once and no memory is contended for.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.target import Target, contiguous_rows, empty
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import amax, scale_of, to_codes
from octavo.numerics import Quantized


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    target: Target | None,
    keep_y: bool,
    centred: bool,
) -> tuple[Tensor | None, Quantized | None, Tensor, Tensor | None, Tensor | None]:
    """Return y, its codes, rstd, total and mean: see `octavo.kernels.norm`. centred: a layer norm."""
    x, (rows, cols) = contiguous_rows(x), x.shape
    residual = None if residual is None else contiguous_rows(residual)
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))
    y = x.new_empty(rows, cols) if keep_y else None
    total = None if residual is None else x.new_empty(rows, cols)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    quantized = None if target is None else empty(target, rows, cols, x.device)
    codes, scale = (None, None) if quantized is None else quantized[:2]
    height, size = _tile(cols)
    group = size if target is None or target.tile.cols is None else target.tile.cols
    _forward_kernel[(triton.cdiv(rows, height),)](  # nothing fused: given rstd, y is the reference's to the bit
        x, x.stride(0), residual, 0 if residual is None else residual.stride(0), weight, bias, eps,
        y, codes, scale, mean, rstd, total, rows, cols,
        POWER_OF_TWO=target is None or target.scaling == "power_of_two",
        GROUP=group, ROWS=height, SIZE=size, num_warps=min(max(height * size // 1024, 1), 16),
        enable_fp_fusion=False,
    )  # fmt: skip
    return y, quantized, rstd, total, mean


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx in x's dtype, dweight and dbias in FP32: see `octavo.kernels.norm`."""
    dy, x, (rows, cols) = contiguous_rows(dy), contiguous_rows(x), x.shape
    residual_grad = None if residual_grad is None else contiguous_rows(residual_grad)
    height, size = _tile(cols)
    programs = min(triton.cdiv(rows, height), _programs(x.device, height * size))
    dx = x.new_empty(rows, cols)
    dweight, dbias = (
        None if parameter is None else x.new_empty(programs, cols, dtype=torch.float32) for parameter in (weight, bias)
    )
    _backward_kernel[(programs,)](
        dy, dy.stride(0), x, x.stride(0), residual_grad, 0 if residual_grad is None else residual_grad.stride(0),
        None if weight is None else weight.contiguous(), mean, rstd, dx, dweight, dbias, rows, cols,
        ROWS=height, SIZE=size, num_warps=min(max(height * size // 512, 4), 16),
    )  # fmt: skip
    return dx, None if dweight is None else dweight.sum(0), None if dbias is None else dbias.sum(0)


def _tile(cols: int) -> tuple[int, int]:
    """Return how many rows a program holds at once, and their padded length."""
    size = max(triton.next_power_of_2(cols), 128)
    return max(2048 // size, 1), size


@cache
def _programs(device: torch.device, elements: int) -> int:
    """Return how many programs walk over the rows, each with so many elements at once: what an SM's registers hold."""
    if device.type != "cuda":
        return 3
    return max(8192 // elements, 1) * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _load(x_ptr, stride, rows, cols, inside):
    return tl.load(x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(x, x_ptr, total_c, rows, cols, inside):
    where = x_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :]
    tl.store(where, to_dtype(x, x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_codes(
    y, codes_ptr, scale_ptr, total_r, total_c, rows, cols, in_rows, inside,
    POWER_OF_TWO: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantise whole rows, one scale a group of columns. y: FP32, 0 outside the matrix."""
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    GROUPS: tl.constexpr = SIZE // GROUP
    grouped = tl.reshape(y, (ROWS, GROUPS, GROUP))
    scale, inverse = scale_of(amax(grouped, 2), FORMAT, POWER_OF_TWO)
    groups, total = tl.arange(0, GROUPS), tl.cdiv(total_c, GROUP)
    where = scale_ptr + groups[None, :].to(tl.int64) * total_r + rows[:, None]  # a group of columns after the other
    tl.store(where, scale, mask=in_rows[:, None] & (groups < total)[None, :])
    scaled = tl.reshape(grouped * inverse[:, :, None], (ROWS, SIZE))
    tl.store(codes_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :], to_codes(scaled, FORMAT), mask=inside)


@triton.jit
def _forward_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, bias_ptr, eps,
    y_ptr, codes_ptr, scale_ptr, mean_ptr, rstd_ptr, total_ptr, total_r, total_c,
    POWER_OF_TWO: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A few rows a program, held whole."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    in_rows, in_cols = rows < total_r, cols < total_c
    inside = in_rows[:, None] & in_cols[None, :]
    x = _load(x_ptr, x_stride, rows, cols, inside)
    if residual_ptr is not None:
        x += _load(residual_ptr, residual_stride, rows, cols, inside)
        _store(x, total_ptr, total_c, rows, cols, inside)
        x = to_dtype(x, total_ptr.dtype.element_ty).to(tl.float32)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / total_c
        tl.store(mean_ptr + rows, mean, mask=in_rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / total_c + eps)
    tl.store(rstd_ptr + rows, rstd, mask=in_rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    if y_ptr is not None:
        _store(y, y_ptr, total_c, rows, cols, inside)
    if codes_ptr is not None:
        _store_codes(
            y, codes_ptr, scale_ptr, total_r, total_c, rows, cols, in_rows, inside,
            POWER_OF_TWO=POWER_OF_TWO, GROUP=GROUP, ROWS=ROWS, SIZE=SIZE,
        )  # fmt: skip


@triton.jit
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, mean_ptr, rstd_ptr,
    dx_ptr, dweight_ptr, dbias_ptr, total_r, total_c, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Every n-th few rows; dweight_ptr and dbias_ptr take one row of sums a program."""
    program, cols = tl.program_id(0), tl.arange(0, SIZE)
    in_cols = cols < total_c
    dweight, dbias = tl.zeros((ROWS, SIZE), tl.float32), tl.zeros((ROWS, SIZE), tl.float32)
    for first in tl.range(program * ROWS, total_r, tl.num_programs(0) * ROWS, num_stages=2):
        rows = first + tl.arange(0, ROWS)
        in_rows = rows < total_r
        inside = in_rows[:, None] & in_cols[None, :]
        dy, x = _load(dy_ptr, dy_stride, rows, cols, inside), _load(x_ptr, x_stride, rows, cols, inside)
        rstd = tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)[:, None]
        if mean_ptr is not None:
            x = tl.where(inside, x - tl.load(mean_ptr + rows, mask=in_rows, other=0.0)[:, None], 0.0)
        normed = x * rstd
        g = dy
        if weight_ptr is not None:
            dweight += dy * normed
            g = dy * tl.load(weight_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
        dx = g - normed * (tl.sum(g * normed, axis=1) / total_c)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(g, axis=1) / total_c)[:, None]
        if dbias_ptr is not None:
            dbias += dy
        dx *= rstd
        if residual_ptr is not None:
            dx += _load(residual_ptr, residual_stride, rows, cols, inside)
        _store(dx, dx_ptr, total_c, rows, cols, inside)
    where = program.to(tl.int64) * total_c + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + where, tl.sum(dweight, axis=0), mask=in_cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + where, tl.sum(dbias, axis=0), mask=in_cols)
