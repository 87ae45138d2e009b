"""Gradient messages in Triton: quantised into the send buffer in one read, decoded and summed in one read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import INTERPRETED, POWER_OF_TWO, amax, scale_of, to_codes
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Shape, cdiv
from octavo.kernels.wire.message import GROUP, message_bytes

TILE = Shape(32, GROUP, warps=4)
"""Groups per program, and values per group."""


def pack(x: Tensor, messages: int, length: int) -> Tensor:
    """See `octavo.kernels.wire.pack`."""
    out = torch.empty(messages, message_bytes(length), dtype=torch.uint8, device=x.device)
    _pack_kernel[_programs(out.shape[1] - length), messages](x, x.numel(), length, out, out.shape[1], **TILE.meta())
    return out


def add(messages: Tensor, length: int, out: Tensor, factor: float) -> None:
    """See `octavo.kernels.wire.add`."""
    parts, terms, width = messages.shape
    _add_kernel[_programs(cdiv(length, GROUP)), parts](
        messages,
        length,
        width,
        out,
        out.numel(),
        factor,
        TERMS=terms,
        CODED=messages.dtype == torch.uint8,
        **TILE.meta(),
    )  # fmt: skip


def _programs(groups: int) -> int:
    return (groups + TILE.height - 1) // TILE.height


@Kernel
@triton.jit
def _pack_kernel(x_ptr, total, length, out_ptr, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    message = tl.program_id(1).to(tl.int64)
    groups, values = _tile(HEIGHT, WIDTH)
    in_message = values < length
    offsets = message * length + values
    x = tl.load(x_ptr + offsets, mask=in_message & (offsets < total), other=0.0).to(tl.float32)
    scale, inverse = scale_of(amax(x, 1), tl.float8e4nv, POWER_OF_TWO)
    codes = to_codes(x * inverse[:, None], tl.float8e4nv).to(tl.uint8, bitcast=True)
    message_ptr = out_ptr + message * width
    tl.store(message_ptr + values, codes, mask=in_message)
    exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(message_ptr + length + groups, exponent, mask=groups < width - length)  # groups past the last are empty


@Kernel
@triton.jit
def _add_kernel(
    messages_ptr, length, width, out_ptr, total, factor, TERMS: tl.constexpr, CODED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1).to(tl.int64)
    groups, values = _tile(HEIGHT, WIDTH)
    in_message = values < length
    result = tl.zeros((HEIGHT, WIDTH), tl.float32)
    message_ptr = messages_ptr + part * TERMS * width
    for _ in tl.range(0, TERMS, loop_unroll_factor=4):
        if CODED:
            codes = tl.load(message_ptr + values, mask=in_message, other=0)
            exponent = tl.load(message_ptr + length + groups, mask=groups * WIDTH < length, other=0)
            scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            result += _decode(codes) * scale[:, None]
        else:
            result += tl.load(message_ptr + values, mask=in_message, other=0.0).to(tl.float32)
        message_ptr += width
    offsets = part * length + values
    value = to_dtype(result * factor, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, value, mask=in_message & (offsets < total))


@triton.jit
def _tile(HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Groups of this program, and the indices of their values in a message."""
    groups = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    return groups, groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _decode(codes):
    """Decode E4M3 codes, uint8, to FP32. Only Triton's interpreter has no NaN in this cast."""
    if INTERPRETED:
        magnitude = (codes.to(tl.int32) & 0x7F) << 20
        value = magnitude.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        value = tl.where(magnitude == 0x7F00000, float("nan"), value)
        result = tl.where(codes >= 128, -value, value)
    else:
        result = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return result
