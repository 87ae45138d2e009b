"""Quantise with a known scale in one read, which also finds the maximum, and again if the scale does not fit.

begin     inverse of the stored scale
write     codes with that scale, and the maximum
settle    choose the scale; decide whether the codes stand
write     codes with the other scale; programs exit at once if the codes stand
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, contiguous_rows
from octavo.kernels.triton.codes import (
    FLOAT32,
    TENSOR,
    emit,
    finite_magnitude,
    format_max,
    inside,
    load_quads,
    quads,
    scale_of,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import Shape
from octavo.numerics import Quantized

WRITE = Shape(64, 64, warps=4)

_INVERSE: tl.constexpr = tl.constexpr(0)
_AMAX: tl.constexpr = tl.constexpr(1)
_AGAIN: tl.constexpr = tl.constexpr(2)
_SIZE = 4
"""FP32 values in the workspace of a call: those three, and one for alignment."""


def quantize_with_scale(
    sources: Sequence[Tensor],
    scale_and_amax: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    just_in_time: bool,
    update_amax: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize_with_scale.quantize_with_scale`. scale_and_amax: (2,)."""
    target = rows or columns
    assert target is not None
    sources = [contiguous_rows(source) for source in sources]
    total, device = (sources[0].shape[0], sum(source.shape[1] for source in sources)), sources[0].device
    surplus = -total[0] % 4  # a transpose is written in words of four codes
    codes = None if rows is None else torch.empty(total, dtype=target.fmt.dtype, device=device)
    codes_t = (
        None if columns is None else torch.empty(total[1], total[0] + surplus, dtype=target.fmt.dtype, device=device)
    )
    scale = torch.empty(1, 1, device=device, dtype=torch.float32)
    work = torch.empty(_SIZE, device=device, dtype=torch.float32)
    _begin_kernel[(1,)](scale_and_amax, work, num_warps=1)
    offsets = [sum(source.shape[1] for source in sources[:i]) for i in range(len(sources))]
    placed = list(zip(sources, offsets, strict=True))
    for source, offset in placed:
        _write(source, offset, total, codes, codes_t, scale_and_amax, work, again=False)
    _settle_kernel[(1,)](
        scale_and_amax, work, scale, FORMAT=tl.float8e4nv if target.format == "e4m3" else tl.float8e5,
        SCALING=target.rule, JUST_IN_TIME=just_in_time, UPDATE_AMAX=update_amax, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    for source, offset in reversed(placed):
        _write(source, offset, total, codes, codes_t, scale_and_amax, work, again=True)
    if codes_t is not None and surplus:
        codes_t = codes_t[:, : total[0]].contiguous()
    return (
        None if rows is None or codes is None else Quantized(codes, scale, rows.tile),
        None if columns is None or codes_t is None else Quantized(codes_t, scale, columns.tile),
    )


def _write(
    x: Tensor, offset: int, total: tuple[int, int], codes: Tensor | None, codes_t: Tensor | None,
    scale_and_amax: Tensor, work: Tensor, *, again: bool,
) -> None:  # fmt: skip
    across, down = WRITE.grid(*x.shape)
    arguments: tuple[Any, ...] = (x, x.stride(0), *x.shape, offset, *total, codes, codes_t, scale_and_amax, work)
    _write_kernel[(across * down,)](*arguments, AGAIN=again, **WRITE.strip(*x.shape))


@Kernel
@triton.jit
def _begin_kernel(stored_ptr, work_ptr):
    first = tl.zeros((1,), tl.int32)
    known = tl.load(stored_ptr + first)
    inverse = (1.0 / tl.where(known > 0.0, known, 1.0).to(tl.float64)).to(tl.float32)  # as the reference rounds it
    tl.store(work_ptr + _INVERSE + first, inverse)
    tl.store(work_ptr + _AMAX + first, tl.zeros((1,), tl.float32))


@Kernel
@triton.jit
def _settle_kernel(
    stored_ptr, work_ptr, scale_ptr,
    FORMAT: tl.constexpr, SCALING: tl.constexpr, JUST_IN_TIME: tl.constexpr, UPDATE_AMAX: tl.constexpr,
):  # fmt: skip
    first = tl.zeros((1,), tl.int32)
    known, amax = tl.load(stored_ptr + first), tl.load(work_ptr + _AMAX + first)
    own, own_inverse = scale_of(amax, FORMAT, SCALING)
    fits = known > 0.0
    if JUST_IN_TIME:
        fits = fits & (amax <= known * format_max(FORMAT))
    inverse = tl.load(work_ptr + _INVERSE + first)
    tl.store(scale_ptr + first, tl.where(fits, known, own))
    tl.store(work_ptr + _INVERSE + first, tl.where(fits, inverse, own_inverse))
    tl.store(work_ptr + _AGAIN + first, tl.where(fits, 0.0, 1.0))
    if UPDATE_AMAX:  # non-negative FP32 values order like their bits
        tl.atomic_max((stored_ptr + 1 + first).to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True))


@Kernel
@triton.jit
def _write_kernel(
    x_ptr, stride, total_r, source_c, offset, rows_out, cols_out, codes_ptr, codes_t_ptr, stored_ptr, work_ptr,
    AGAIN: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes and transposed codes of STEPS vertically adjacent tiles, and, unless AGAIN, their maximum."""
    if AGAIN:
        writes = tl.load(work_ptr + _AGAIN) > 0.0
    else:
        writes = tl.load(stored_ptr) > 0.0
    if writes or not AGAIN:
        across = tl.cdiv(source_c, WIDTH)
        number = tl.program_id(0)
        if AGAIN:  # in reverse order: the last reads are still cached
            number = tl.num_programs(0) - 1 - number
        strip, tile_c = number // across, number % across
        source = tile_c * WIDTH + tl.arange(0, WIDTH)
        in_cols = inside(source, source_c, EVEN)
        cols = source + offset
        running = tl.zeros((HEIGHT // 4, WIDTH), tl.float32)
        for step in tl.range(STEPS, num_stages=STAGES):
            tile_r = strip * STEPS + step
            rows, in_rows = quads(tile_r, total_r, HEIGHT, EVEN)
            x = load_quads(x_ptr, stride, None, rows, source, in_rows, in_cols)
            if not AGAIN:
                upper = tl.maximum(finite_magnitude(x[0]), finite_magnitude(x[1]))
                lower = tl.maximum(finite_magnitude(x[2]), finite_magnitude(x[3]))
                running = tl.maximum(running, tl.maximum(upper, lower))
            if writes:
                at, inverse = (rows, cols, in_rows, in_cols, tile_r, tile_c), work_ptr + _INVERSE
                if codes_ptr is not None:
                    out = codes_ptr, None, 0, 0, inverse
                    emit(x, out, (rows_out, cols_out), at, TENSOR, FLOAT32, TRANSPOSED=False, EVEN=EVEN)
                if codes_t_ptr is not None:
                    out = codes_t_ptr, None, 0, 0, inverse
                    emit(x, out, (rows_out, cols_out), at, TENSOR, FLOAT32, TRANSPOSED=True, EVEN=EVEN)
        if not AGAIN:
            # No write without a change: thousands of programs share this value.
            largest = tl.max(running).to(tl.int32, bitcast=True)
            amax_ptr = (work_ptr + _AMAX).to(tl.pointer_type(tl.int32))
            tl.atomic_max(amax_ptr, largest, mask=largest > tl.load(amax_ptr), sem="relaxed")
