"""Statistics of a tensor from sampled rows, in two launches.

look      one program per segment of a sampled row, of the scales, or of a product's edges: 16 partial results
gather    one program: sums of these in FP64, the tile with the largest scale, and the row of telemetry

With bins requested, look also writes histogram bins and the powers of signal and noise, and gather sums them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.sample import BINS, DETAILED, LOWEST, PHASE, SAMPLED, STATS, WIDTH, SampleInput, count, limits
from octavo.kernels.triton.codes import to_codes
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv

BLOCK = 2048
"""Elements per program of look."""
_GATHERED = 256
"""Programs of look whose results gather sums at once."""
_FIELDS: tl.constexpr = tl.constexpr(16)
_AT_PHASE: tl.constexpr = tl.constexpr(PHASE)
_AT_SAMPLED: tl.constexpr = tl.constexpr(SAMPLED)
_AT_DETAILED: tl.constexpr = tl.constexpr(DETAILED)
_AT_SQNR: tl.constexpr = tl.constexpr(STATS.index("sqnr"))
_AT_BINS: tl.constexpr = tl.constexpr(WIDTH)
_BINS: tl.constexpr = tl.constexpr(BINS)
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)
_NONE: tl.constexpr = tl.constexpr(2**31 - 1)
_FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "int8": tl.int8}


def sample(operand: SampleInput, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample`."""
    x, scale, target, fold, edges = operand[:5]
    rows, cols = operand.shape
    height, width = target.tile.tile(rows, cols)
    number = count(rows)
    segments = cdiv(cols, BLOCK)
    programs = [number * segments, cdiv(scale.numel(), BLOCK), 0 if edges is None else cdiv(rows, BLOCK)]
    work = torch.empty(sum(programs), 16, device=x.device, dtype=torch.float32)
    detailed = len(row) > WIDTH
    bins = torch.empty(programs[0] if detailed else 0, BINS, dtype=torch.int32, device=x.device)
    powers = torch.empty(programs[0] if detailed else 0, 4, device=x.device, dtype=torch.float32)
    tensor: tuple[Any, ...] = (x, rows, cols, x.stride(0), x.stride(1))
    scales: tuple[Any, ...] = (scale, *scale.shape, *scale.stride(), height, width)
    edge = (x, 0, 0) if edges is None else (edges, *edges.stride())
    bounds = limits(target.fmt)
    _look_kernel[(sum(programs),)](
        *tensor, fold, 0 if fold is None or fold.shape[0] == 1 else fold.stride(0), *scales, *edge, row, work,
        bins, powers, programs[0], programs[1], segments, rows // number,
        FOLDED=fold is not None, SAMPLE_ONLY=operand.rows is not None, CODED=operand.is_coded, DETAILED=detailed,
        FORMAT=_FORMATS[target.format],
        FLUSHED=bounds.flushed, SUBNORMAL=bounds.subnormal, SATURATED=bounds.saturated,
        BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _gather_kernel[(1,)](
        *tensor, *scales, row, work, bins, powers, sum(programs), programs[0], float(number), float(rows), float(cols),
        operand.bound, TILE=operand.reads_tile, CODED=operand.is_coded, DETAILED=detailed, BLOCK=_GATHERED,
        TILE_BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@Kernel
@triton.jit
def _look_kernel(
    x_ptr, rows, cols, x_down, x_across, fold_ptr, fold_down,
    scale_ptr, scale_rows, scale_cols, scale_down, scale_across, height, width,
    edge_ptr, edge_down, edge_across, row_ptr, work_ptr, bins_ptr, powers_ptr, samples, scalings, segments, stride,
    FOLDED: tl.constexpr, SAMPLE_ONLY: tl.constexpr, CODED: tl.constexpr, DETAILED: tl.constexpr, FORMAT: tl.constexpr,
    FLUSHED: tl.constexpr, SUBNORMAL: tl.constexpr, SATURATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fields: counts of finite, other, flushed, subnormal, saturated; amax; unit, 4 sums; scale, its index; lost rows.

    The sums are of the powers 1 to 4 of x over a power of two near the segment's amax, whose biased exponent is unit.
    """
    phase = tl.load(row_ptr + _AT_PHASE).to(tl.int32)
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    work_ptr += pid * _FIELDS
    if phase >= 0:
        if pid < samples:
            column = (pid % segments) * BLOCK + lane
            row = ((pid // segments).to(tl.int64) * stride + phase) % rows
            mask = column < cols
            read_row = (pid // segments).to(tl.int64) if SAMPLE_ONLY else row
            offsets = read_row * x_down + column.to(tl.int64) * x_across
            tile = (row // height) * scale_down + (column // width).to(tl.int64) * scale_across
            scale = tl.load(scale_ptr + tile, mask=mask, other=1.0)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            x = x * scale if CODED else x
            fold_row_ptr = fold_ptr + (pid // segments).to(tl.int64) * fold_down if FOLDED else fold_ptr
            read = x * tl.load(fold_row_ptr + column, mask=mask, other=0.0) if FOLDED else x
            signed = read * tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale)
            y = tl.abs(signed)
            finite = (tl.abs(x) < float("inf")) & mask
            found = _look_at_values(x, read, y, finite, mask, FLUSHED, SUBNORMAL, SATURATED)
            if DETAILED:
                if tl.load(row_ptr + _AT_DETAILED) > 0:
                    valid = finite & (y < float("inf"))
                    _look_closer(valid, read, signed, scale, bins_ptr + pid * _BINS, powers_ptr + pid * 4, FORMAT)
        elif pid < samples + scalings:
            place = (pid - samples) * BLOCK + lane
            found = _look_at_scales(scale_ptr, place, scale_rows, scale_cols, scale_down, scale_across)
        else:
            line = ((pid - samples - scalings) * BLOCK + lane).to(tl.int64)
            found = _look_at_edges(edge_ptr, line, rows, edge_down, edge_across)
        tl.store(work_ptr + tl.arange(0, _FIELDS), found)


@triton.jit
def _look_at_values(x, read, y, finite, mask, FLUSHED: tl.constexpr, SUBNORMAL: tl.constexpr, SATURATED: tl.constexpr):
    """Count the elements of a segment by the outcome of quantisation, and sum their powers. y: |read / scale|."""
    magnitude = tl.abs(x)
    flushed = finite & (read != 0.0) & (y <= FLUSHED)
    subnormal = finite & (y > FLUSHED) & (y < SUBNORMAL)
    saturated = finite & (y > SATURATED)
    amax = tl.max(tl.where(finite, magnitude, 0.0))
    unit = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 1), 253)
    u = tl.where(finite, x, 0.0) * ((254 - unit) << 23).to(tl.float32, bitcast=True)
    square = u * u
    broken = mask & ((magnitude == float("inf")) | (x != x))
    found = tl.zeros((_FIELDS,), tl.float32)
    found = _put(found, 0, tl.sum(finite.to(tl.float32)))
    found = _put(found, 1, tl.sum(broken.to(tl.float32)))
    found = _put(found, 2, tl.sum(flushed.to(tl.float32)))
    found = _put(found, 3, tl.sum(subnormal.to(tl.float32)))
    found = _put(found, 4, tl.sum(saturated.to(tl.float32)))
    found = _put(found, 5, amax)
    found = _put(found, 6, unit.to(tl.float32))
    found = _put(found, 7, tl.sum(u))
    found = _put(found, 8, tl.sum(square))
    found = _put(found, 9, tl.sum(square * u))
    return _put(found, 10, tl.sum(square * square))


@triton.jit
def _look_at_scales(scale_ptr, place, rows, cols, down, across):
    """Find the largest scale of a segment, and its first index."""
    mask = place < rows * cols
    offsets = (place // cols).to(tl.int64) * down + (place % cols) * across
    scale = tl.load(scale_ptr + offsets, mask=mask, other=0.0)
    largest = tl.max(scale)
    found = _put(tl.zeros((_FIELDS,), tl.float32), 11, largest)
    return _put(found, 12, tl.min(tl.where(mask & (scale == largest), place, _NONE)).to(tl.float32))


@triton.jit
def _look_at_edges(edge_ptr, line, rows, down, across):
    """Count the rows of a product whose first and last elements are both non-finite."""
    mask = line < rows
    first = tl.load(edge_ptr + line * down, mask=mask, other=0.0).to(tl.float32)
    last = tl.load(edge_ptr + line * down + across, mask=mask, other=0.0).to(tl.float32)
    stands = (tl.abs(first) < float("inf")) | (tl.abs(last) < float("inf"))
    found = tl.zeros((_FIELDS,), tl.float32)
    return _put(found, 13, tl.sum(tl.where(mask & (stands == 0), 1.0, 0.0)))


@triton.jit
def _look_closer(valid, read, y, scale, bins_ptr, powers_ptr, FORMAT: tl.constexpr):
    """Store a histogram of exponents, a unit, and the powers of signal and noise over its square."""
    exponent = ((y.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    place = tl.minimum(tl.maximum(exponent - _LOWEST, 0), _BINS - 1)
    counts = tl.histogram(place, _BINS, mask=valid & (read != 0.0))
    tl.store(bins_ptr + tl.arange(0, _BINS), counts)
    signal = tl.where(valid, read, 0.0)
    unit = tl.minimum(tl.maximum(tl.max(tl.abs(signal)).to(tl.int32, bitcast=True) >> 23, 1), 253)
    inverse = ((254 - unit) << 23).to(tl.float32, bitcast=True)
    noise = tl.where(valid, read - to_codes(y, FORMAT).to(tl.float32) * scale, 0.0) * inverse
    signal = signal * inverse
    tl.store(powers_ptr, unit.to(tl.float32))
    tl.store(powers_ptr + 1, tl.sum(signal * signal))
    tl.store(powers_ptr + 2, tl.sum(noise * noise))


@triton.jit
def _gather_closer(row_ptr, bins_ptr, powers_ptr, samples, CODED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the results of `_look_closer` over all programs."""
    counts = tl.zeros((_BINS,), tl.int32)
    signal = tl.zeros((BLOCK,), tl.float64)
    noise = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, samples, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < samples
        offsets = (at * _BINS)[:, None] + tl.arange(0, _BINS)[None, :]
        counts += tl.sum(tl.load(bins_ptr + offsets, mask=mask[:, None], other=0), axis=0)
        unit = tl.load(powers_ptr + at * 4, mask=mask, other=0.0).to(tl.int64)
        unit = ((unit + (1023 - 127)) << 52).to(tl.float64, bitcast=True)
        signal += unit * unit * tl.load(powers_ptr + at * 4 + 1, mask=mask, other=0.0).to(tl.float64)
        noise += unit * unit * tl.load(powers_ptr + at * 4 + 2, mask=mask, other=0.0).to(tl.float64)
    tl.store(row_ptr + _AT_BINS + tl.arange(0, _BINS), counts.to(tl.float32))
    whole = tl.sum(signal)
    lost = tl.sum(noise)
    is_lossy = (whole > 0.0) & (lost > 0.0)
    ratio = tl.where(is_lossy, whole, 1.0) / tl.where(is_lossy, lost, 1.0)
    sqnr = tl.where(is_lossy, 3.0102999566398120 * tl.log2(ratio), float("nan")).to(tl.float32)
    tl.store(row_ptr + _AT_SQNR, sqnr * (float("nan") if CODED else 1.0))


@triton.jit
def _put(found, field: tl.constexpr, value):
    """Return the results with one field set."""
    return tl.where(tl.arange(0, _FIELDS) == field, value, found)


@triton.jit
def _moments(first, second, third, fourth, finite):
    """Return mean, variance and kurtosis from the power sums of `finite` elements."""
    mean = first / finite
    raw2 = second / finite
    raw3 = third / finite
    raw4 = fourth / finite
    variance = tl.maximum(raw2 - mean * mean, 0.0)
    kurtosis = (raw4 - 4.0 * mean * raw3 + 6.0 * mean * mean * raw2 - 3.0 * mean * mean * mean * mean) / (
        variance * variance
    )
    return mean, variance, kurtosis


@triton.jit
def _largest_of_tile(
    x_ptr, rows, cols, x_down, x_across, top, left, height, width, scale, CODED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest finite magnitude of a tile of x."""
    running = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, height * width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        down = top + at // width
        across = left + at % width
        mask = (at < height * width) & (down < rows) & (across < cols)
        offsets = down.to(tl.int64) * x_down + across.to(tl.int64) * x_across
        value = tl.abs(tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32))
        value = value * scale if CODED else value
        running = tl.maximum(running, tl.where(value < float("inf"), value, 0.0))
    return tl.max(running)


@Kernel
@triton.jit
def _gather_kernel(
    x_ptr, rows, cols, x_down, x_across,
    scale_ptr, scale_rows, scale_cols, scale_down, scale_across, height, width,
    row_ptr, work_ptr, bins_ptr, powers_ptr, findings, samples, sampled, height_all, width_all, bound,
    TILE: tl.constexpr, CODED: tl.constexpr, DETAILED: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    phase = tl.load(row_ptr + _AT_PHASE)
    if phase >= 0:
        number = tl.zeros((BLOCK,), tl.float64)
        broken, flushed, subnormal, saturated, lost = number, number, number, number, number
        first, second, third, fourth = number, number, number, number
        amax = tl.zeros((BLOCK,), tl.float32)
        scale = tl.zeros((BLOCK,), tl.float32)
        place = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, findings, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < findings
            field = work_ptr + at * _FIELDS
            number += tl.load(field, mask=mask, other=0.0).to(tl.float64)
            broken += tl.load(field + 1, mask=mask, other=0.0).to(tl.float64)
            flushed += tl.load(field + 2, mask=mask, other=0.0).to(tl.float64)
            subnormal += tl.load(field + 3, mask=mask, other=0.0).to(tl.float64)
            saturated += tl.load(field + 4, mask=mask, other=0.0).to(tl.float64)
            amax = tl.maximum(amax, tl.load(field + 5, mask=mask, other=0.0))
            unit = tl.load(field + 6, mask=mask, other=0.0).to(tl.int64)
            unit = ((unit + (1023 - 127)) << 52).to(tl.float64, bitcast=True)
            power = unit
            first += power * tl.load(field + 7, mask=mask, other=0.0).to(tl.float64)
            power = power * unit
            second += power * tl.load(field + 8, mask=mask, other=0.0).to(tl.float64)
            power = power * unit
            third += power * tl.load(field + 9, mask=mask, other=0.0).to(tl.float64)
            power = power * unit
            fourth += power * tl.load(field + 10, mask=mask, other=0.0).to(tl.float64)
            found = tl.load(field + 11, mask=mask, other=0.0)
            is_larger = found > scale
            place = tl.where(is_larger, tl.load(field + 12, mask=mask, other=0.0), place)
            scale = tl.where(is_larger, found, scale)
            lost += tl.load(field + 13, mask=mask, other=0.0).to(tl.float64)
        largest_scale = tl.max(scale)
        largest = tl.max(amax)
        is_bound = largest_scale > 1.1754943508222875e-38
        largest = tl.maximum(largest, tl.where(is_bound, largest_scale * bound, 0.0))
        if TILE:
            tile = tl.min(tl.where(scale == largest_scale, place, 16777216.0)).to(tl.int32)
            tile_amax = _largest_of_tile(
                x_ptr, rows, cols, x_down, x_across, (tile // scale_cols) * height, (tile % scale_cols) * width,
                height, width, largest_scale, CODED, TILE_BLOCK,
            )  # fmt: skip
            largest = tl.maximum(largest, tile_amax)

        finite = tl.sum(number)
        mean, variance, kurtosis = _moments(tl.sum(first), tl.sum(second), tl.sum(third), tl.sum(fourth), finite)
        wide = width_all + tl.zeros((1,), tl.float64)
        looked = tl.sum(sampled * wide)
        total = tl.sum(height_all * wide)
        rows_lost = tl.sum(lost)
        rows_lost = tl.where(rows_lost < height_all, rows_lost, 0.0)  # all: the other operand causes that too
        share = tl.maximum(tl.sum(broken) / looked, rows_lost / total).to(tl.float32)
        before = tl.load(row_ptr)
        tl.store(row_ptr, tl.where(before >= largest, before, largest))
        tl.store(row_ptr + 1, largest_scale)
        known = float("nan") if CODED else 1.0
        tl.store(row_ptr + 2, (tl.sum(flushed) / looked).to(tl.float32) * known)
        tl.store(row_ptr + 3, (tl.sum(subnormal) / looked).to(tl.float32))
        tl.store(row_ptr + 4, (tl.sum(saturated) / looked).to(tl.float32) * known)
        before = tl.load(row_ptr + 5)
        tl.store(row_ptr + 5, tl.where(before >= share, before, share))
        tl.store(row_ptr + 6, mean.to(tl.float32))
        tl.store(row_ptr + 7, variance.to(tl.float32))
        tl.store(row_ptr + 8, kurtosis.to(tl.float32))
        tl.store(row_ptr + _AT_SAMPLED, looked.to(tl.float32))
        if DETAILED:
            if tl.load(row_ptr + _AT_DETAILED) > 0:
                _gather_closer(row_ptr, bins_ptr, powers_ptr, samples, CODED, 64)
