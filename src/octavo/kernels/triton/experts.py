"""Passes over the rows of experts, one row a program: see `octavo.kernels.experts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import INPUTS
from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty
from octavo.kernels.triton.activation import value_and_slope
from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import INTERPRETED, SIDE, amax, scale_of, to_codes
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import next_power_of_2, row_warps
from octavo.numerics import Quantized


def quantize_tokens(x: Tensor, place: Tensor, target: QuantSpec) -> list[Quantized]:
    """See `octavo.kernels.experts.quantize_tokens`."""
    x, (tokens, cols) = contiguous_rows(x), x.shape
    made = [empty(target, rows, cols, x.device) for rows in (tokens, place.numel())]
    _quantize_kernel[(tokens,)](
        x, x.stride(0), cols, place.contiguous(), *made[0][:2], *made[1][:2],
        COPIES=place.shape[1], POWER_OF_TWO=target.scaling == "power_of_two", **_meta(cols),
    )  # fmt: skip
    return made


def combine(y: Tensor, place: Tensor) -> Tensor:
    """See `octavo.kernels.experts.combine`."""
    y = y.contiguous()
    out = torch.empty(place.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    _combine_kernel[(len(out),)](y, out, place.contiguous(), y.shape[1], COPIES=place.shape[1], **_meta(y.shape[1]))
    return out


def activation_backward(
    kind: str, dh: Tensor, gate: Tensor | Quantized, up: Tensor | Quantized | None, weights: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.experts.activation_backward`."""
    (rows, width), device = dh.shape, dh.device
    scales = [x.scale if isinstance(x, Quantized) else None for x in (gate, up)]
    values = [x.codes if isinstance(x, Quantized) else x for x in (gate, up)]
    values = [None if x is None else contiguous_rows(x) for x in values]
    d_inputs = torch.empty(rows, width if up is None else 2 * width, dtype=dh.dtype, device=device)
    codes = torch.empty(rows, width, dtype=INPUTS.fmt.dtype, device=device)
    d_weights = torch.empty(rows, dtype=torch.float32, device=device)
    _activation_backward_kernel[(rows,)](
        dh.contiguous(), *values, *(0 if x is None else x.stride(0) for x in values), *scales,
        weights.contiguous(), scale.contiguous(), d_inputs, codes, d_weights, rows, width, KIND=kind, **_meta(width),
    )  # fmt: skip
    return d_inputs, codes, d_weights


def _meta(cols: int) -> dict[str, object]:
    size = max(next_power_of_2(cols), SIDE.value)
    return {"SIZE": size, "num_warps": row_warps(size), "enable_fp_fusion": False}


@Kernel
@triton.jit
def _quantize_kernel(
    x_ptr, stride, total_c, place_ptr, token_codes, token_scale, row_codes, row_scale,
    COPIES: tl.constexpr, POWER_OF_TWO: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The codes of one token, written once as it lies and once for each expert that it is sent to."""
    FORMAT: tl.constexpr = token_codes.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    there = cols < total_c
    x = tl.load(x_ptr + token * stride + cols, mask=there, other=0.0).to(tl.float32)
    scale, inverse = scale_of(amax(x, 0), FORMAT, POWER_OF_TWO)
    codes = to_codes(x * inverse, FORMAT)
    tl.store(token_scale + token, scale)
    tl.store(token_codes + token * total_c + cols, codes, mask=there)
    for copy in tl.static_range(COPIES):
        row = tl.load(place_ptr + token * COPIES + copy).to(tl.int64)
        tl.store(row_scale + row, scale)
        tl.store(row_codes + row * total_c + cols, codes, mask=there)


@Kernel
@triton.jit
def _combine_kernel(y_ptr, out_ptr, place_ptr, total_c, COPIES: tl.constexpr, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    there = cols < total_c
    total = tl.zeros((SIZE,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(place_ptr + token * COPIES + copy).to(tl.int64)
        total += tl.load(y_ptr + row * total_c + cols, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * total_c + cols, to_dtype(total, out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _load_row(x_ptr, scale_ptr, stride, row, total_r, total_c, SIZE: tl.constexpr):
    """A row in FP32, that may be kept in codes: then one scale for 128 columns, column after column."""
    cols = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < total_c, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        if INTERPRETED:  # it takes the codes of NaN for 480
            x = tl.where(tl.abs(x) > 448.0, float("nan"), x)
        tiles = tl.arange(0, SIZE // SIDE)
        scale = tl.load(scale_ptr + tiles.to(tl.int64) * total_r + row, mask=tiles * SIDE < total_c, other=0.0)
        x = tl.reshape(tl.reshape(x, (SIZE // SIDE, SIDE)) * scale[:, None], (SIZE,))
    return x


@Kernel
@triton.jit
def _activation_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, gate_stride, up_stride, gate_scale, up_scale, weight_ptr, scale_ptr,
    d_inputs_ptr, codes_ptr, d_weight_ptr, total_r, total_c, KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    there = cols < total_c
    dh = tl.load(dh_ptr + row * total_c + cols, mask=there, other=0.0).to(tl.float32)
    gate = _load_row(gate_ptr, gate_scale, gate_stride, row, total_r, total_c, SIZE)
    value, slope = value_and_slope(gate, KIND)
    weighted = dh * tl.load(weight_ptr + row)
    OUT: tl.constexpr = d_inputs_ptr.dtype.element_ty
    if up_ptr is not None:
        up = _load_row(up_ptr, up_scale, up_stride, row, total_r, total_c, SIZE)
        h = value * up
        where = d_inputs_ptr + row * 2 * total_c + cols
        tl.store(where, to_dtype(weighted * up * slope, OUT), mask=there)
        tl.store(where + total_c, to_dtype(weighted * value, OUT), mask=there)
    else:
        h = value
        tl.store(d_inputs_ptr + row * total_c + cols, to_dtype(weighted * slope, OUT), mask=there)
    tl.store(d_weight_ptr + row, tl.sum(dh * h, axis=0))
    codes = to_codes(h * (1.0 / tl.load(scale_ptr + row)), codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * total_c + cols, codes, mask=there)
