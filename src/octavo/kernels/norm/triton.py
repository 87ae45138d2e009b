"""RMS norm and layer norm: a program holds whole rows, so that one read gives y, its statistics and its codes.

In the backward, a fixed number of persistent programs loop over all rows. Each accumulates its partial sums over rows
in registers and stores them once: dy and x are read once, without atomics.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty
from octavo.kernels.triton.cast import rounded_product, to_dtype
from octavo.kernels.triton.codes import (
    INTERPRETED,
    inside,
    integer_scale,
    largest,
    nearest_codes,
    rotate,
    scale_of,
    to_integers,
    without_infinities,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Rows, Shape, cdiv
from octavo.numerics import Quantized, block_for

FORWARD = Rows(elements=2048, per_thread=32)
BACKWARD = Rows(elements=2048, per_thread=16)
STAGES = 2
"""Pipeline stages of the backward's loop over rows."""
RESIDENT = 12288
"""Elements that the backward's programs hold at once per SM, limited by its registers."""
SUM = Shape(64, 32, warps=4)
"""Tile of partial sums that a program reduces at once."""


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: QuantSpec | None,
    centred: bool,
    second: QuantSpec | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Quantized | None, Tensor, Tensor | None, Quantized | None, Tensor | None]:
    """Return what `reference.forward` does, from one read of x and addend. centred: layer norm."""
    dtype = x.dtype if addend is None else torch.promote_types(x.dtype, addend.dtype)
    x, (rows, cols) = contiguous_rows(x), x.shape
    addend, total = (None, None) if addend is None else (contiguous_rows(addend), x.new_empty(rows, cols, dtype=dtype))
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))
    y = x.new_empty(rows, cols, dtype=dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    quantized, others = (None if spec is None else empty(spec, rows, cols, x.device) for spec in (target, second))
    memory = [tensor for made in (quantized, others) for tensor in (made or (None, None))[:2]]
    height, size = FORWARD.tile(cols)
    group = size if target is None or target.tile.cols is None else target.tile.cols
    block = 1 if target is None else block_for(cols, target.rotation)
    _forward_kernel[(cdiv(rows, height),)](
        # Without FMAs y equals the reference's bit for bit, given rstd. But a layer norm is bound by instructions. The
        # specification rounds y before the additions of a rotation.
        x, x.stride(0), addend, 0 if addend is None else addend.stride(0), total, weight, bias, eps, y, *memory,
        mean, rstd, rows, cols,
        SCALING=1 if target is None else target.rule, SECOND=1 if second is None else second.rule, GROUP=group,
        ROTATION=block, **FORWARD.meta(rows, cols), enable_fp_fusion=centred and block == 1,
    )  # fmt: skip
    return y, quantized, rstd, mean, others, total


def backward(
    dy: Tensor,
    x: Tensor | Quantized,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    passing: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx in x's dtype, dweight and dbias in those of weight and bias: see `octavo.kernels.norm`."""
    passing = None if passing is None else contiguous_rows(passing)
    dtype, scale = (x.dtype, None) if isinstance(x, Tensor) else (dy.dtype, x.scale)
    x = x if isinstance(x, Tensor) else x.codes
    dy, x, (rows, cols) = contiguous_rows(dy), contiguous_rows(x), x.shape
    height, size = BACKWARD.tile(cols)
    programs = min(cdiv(rows, height), _programs(x.device, height * size))
    dx = x.new_empty(rows, cols, dtype=dtype)
    dweight, dbias = (
        None if parameter is None else x.new_empty(programs, cols, dtype=torch.float32) for parameter in (weight, bias)
    )
    _backward_kernel[(programs,)](
        dy, dy.stride(0), x, x.stride(0), scale,
        None if weight is None else weight.contiguous(), mean, rstd,
        passing, 0 if passing is None else passing.stride(0), dx, dweight, dbias, rows, cols,
        STAGES=STAGES, **BACKWARD.meta(rows, cols),
    )  # fmt: skip
    return dx, _summed(dweight, weight), _summed(dbias, bias)


def _summed(partials: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the partial sums (programs, D) reduced to (D,), in the dtype of the parameter."""
    if partials is None or parameter is None:
        return None
    programs, cols = partials.shape
    total = torch.empty(cols, dtype=parameter.dtype, device=partials.device)
    _sum_kernel[(cdiv(cols, SUM.width),)](
        partials, total, programs, cols, HEIGHT=SUM.height, WIDTH=SUM.width, num_warps=SUM.warps
    )
    return total


@cache
def _programs(device: torch.device, elements: int) -> int:
    """Return how many programs, holding `elements` elements each, fit the registers of all SMs."""
    if device.type != "cuda":
        return 3
    return max(RESIDENT // elements, 1) * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _load(x_ptr, stride, rows, cols, mask):
    return tl.load(x_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_values(x_ptr, scale_ptr, stride, total_r, total_c, rows, cols, in_rows, mask):
    """Load whole rows in FP32, from values, or from codes with one scale per 128 columns, stored column-major."""
    x = _load(x_ptr, stride, rows, cols, mask)
    if scale_ptr is not None:
        GROUPS: tl.constexpr = x.shape[1] // 128
        if INTERPRETED:  # it decodes the codes of NaN as 480
            x = tl.where(tl.abs(x) > 448.0, float("nan"), x)
        groups = tl.arange(0, GROUPS)
        scale_ptrs = scale_ptr + groups[None, :].to(tl.int64) * total_r + rows[:, None]
        scale = tl.load(scale_ptrs, mask=in_rows[:, None] & (groups * 128 < total_c)[None, :], other=0.0)
        x = tl.reshape(tl.reshape(x, (x.shape[0], GROUPS, 128)) * scale[:, :, None], x.shape)
    return x


@triton.jit
def _parameter(x_ptr, cols, in_cols):
    """Load a vector in FP32, (1, D)."""
    return tl.load(x_ptr + cols[None, :], mask=in_cols[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(x, x_ptr, total_c, rows, cols, mask):
    out_ptrs = x_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :]
    tl.store(out_ptrs, to_dtype(x, x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(
    y, scale_ptr, rows, in_rows, total_r, total_c, FORMAT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr
):
    """Whole rows divided by their scales; stores one scale per group of columns. y: FP32, 0 outside the matrix."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    y = without_infinities(y)  # scaling adds none
    if GROUPS == 1:
        scale, inverse = scale_of(largest(y, 1), FORMAT, SCALING)
        tl.store(scale_ptr + rows, scale, mask=in_rows)
        y = y * inverse[:, None]
    else:
        grouped = tl.reshape(y, (ROWS, GROUPS, GROUP))
        scale, inverse = scale_of(largest(grouped, 2), FORMAT, SCALING)
        groups, total = tl.arange(0, GROUPS), tl.cdiv(total_c, GROUP)
        scale_ptrs = scale_ptr + groups[None, :].to(tl.int64) * total_r + rows[:, None]  # column-major
        tl.store(scale_ptrs, scale, mask=in_rows[:, None] & (groups < total)[None, :])
        y = tl.reshape(grouped * inverse[:, :, None], (ROWS, GROUPS * GROUP))
    return y


@triton.jit
def _emit(
    y, codes_ptr, scale_ptr, rows, in_rows, cols, mask, total_r, total_c, SCALING: tl.constexpr, GROUP: tl.constexpr
):
    """Quantise whole rows, and store codes and scales. y: FP32, 0 outside the matrix."""
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    if FORMAT == tl.int8:
        tl.static_assert(GROUP == y.shape[1])
        scale, inverse, keep = integer_scale(y, 1, SCALING)
        tl.store(scale_ptr + rows, scale, mask=in_rows)
        codes = to_integers(y * inverse[:, None], keep[:, None])
    else:
        codes = nearest_codes(_scaled(y, scale_ptr, rows, in_rows, total_r, total_c, FORMAT, SCALING, GROUP), FORMAT)
    tl.store(codes_ptr + rows[:, None].to(tl.int64) * total_c + cols[None, :], codes, mask=mask)


@Kernel
@triton.jit
def _forward_kernel(
    x_ptr, x_stride, addend_ptr, addend_stride, sum_ptr, weight_ptr, bias_ptr, eps, y_ptr, codes_ptr, scale_ptr,
    second_codes, second_scale, mean_ptr, rstd_ptr, total_r, total_c,
    SCALING: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, ROTATION: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows per program."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    in_rows, in_cols = inside(rows, total_r, EVEN), inside(cols, total_c, EVEN)
    mask = in_rows[:, None] & in_cols[None, :]
    x = _load(x_ptr, x_stride, rows, cols, mask)
    if addend_ptr is not None:  # the norm is that of the sum as others read it
        x = to_dtype(x + _load(addend_ptr, addend_stride, rows, cols, mask), sum_ptr.dtype.element_ty).to(tl.float32)
        _store(x, sum_ptr, total_c, rows, cols, mask)
    if mean_ptr is not None:
        mean = tl.sum(x, axis=1) / total_c
        tl.store(mean_ptr + rows, mean, mask=in_rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / total_c + eps)
    tl.store(rstd_ptr + rows, rstd, mask=in_rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y *= _parameter(weight_ptr, cols, in_cols)
    if bias_ptr is not None:
        y += _parameter(bias_ptr, cols, in_cols)
    _store(y, y_ptr, total_c, rows, cols, mask)
    if second_codes is not None:
        _emit(y, second_codes, second_scale, rows, in_rows, cols, mask, total_r, total_c, SECOND, SIZE)
    if codes_ptr is not None:
        _emit(rotate(y, ROTATION), codes_ptr, scale_ptr, rows, in_rows, cols, mask, total_r, total_c, SCALING, GROUP)


@Kernel
@triton.jit
def _backward_kernel(
    dy_ptr, dy_stride, x_ptr, x_stride, scale_ptr, weight_ptr, mean_ptr, rstd_ptr, passing_ptr, passing_stride,
    dx_ptr, dweight_ptr, dbias_ptr, total_r, total_c,
    ROWS: tl.constexpr, SIZE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every n-th block of ROWS rows; dweight_ptr and dbias_ptr take one row of partial sums per program."""
    program, cols = tl.program_id(0), tl.arange(0, SIZE)
    in_cols = inside(cols, total_c, EVEN)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, cols, in_cols)
    dweight, dbias = tl.zeros((ROWS, SIZE), tl.float32), tl.zeros((ROWS, SIZE), tl.float32)
    for first in tl.range(program * ROWS, total_r, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        in_rows = inside(rows, total_r, EVEN)
        mask = in_rows[:, None] & in_cols[None, :]
        dy = _load(dy_ptr, dy_stride, rows, cols, mask)
        x = _load_values(x_ptr, scale_ptr, x_stride, total_r, total_c, rows, cols, in_rows, mask)
        rstd = tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)[:, None]
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + rows, mask=in_rows, other=0.0)[:, None], 0.0)
        normed = x * rstd
        g = dy
        if weight_ptr is not None:
            dweight += dy * normed
            g = dy * weight
        dx = g - normed * (tl.sum(g * normed, axis=1) / total_c)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(g, axis=1) / total_c)[:, None]
        if dbias_ptr is not None:
            dbias += dy
        dx = rounded_product(dx, rstd)
        if passing_ptr is not None:
            dx = to_dtype(dx, dx_ptr.dtype.element_ty).to(tl.float32)
            dx += _load(passing_ptr, passing_stride, rows, cols, mask)
        _store(dx, dx_ptr, total_c, rows, cols, mask)
    offsets = program.to(tl.int64) * total_c + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + offsets, tl.sum(dweight, axis=0), mask=in_cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + offsets, tl.sum(dbias, axis=0), mask=in_cols)


@Kernel
@triton.jit
def _sum_kernel(partials_ptr, total_ptr, total_r, total_c, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Sums over the rows of an FP32 matrix, WIDTH columns per program."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = cols < total_c
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(0, total_r, HEIGHT):
        rows = first + tl.arange(0, HEIGHT)
        total += _load(partials_ptr, total_c, rows, cols, (rows < total_r)[:, None] & in_cols[None, :])
    tl.store(total_ptr + cols, to_dtype(tl.sum(total, axis=0), total_ptr.dtype.element_ty), mask=in_cols)
