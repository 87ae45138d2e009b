"""Reference `sample` in NumPy, for few calls on the sampled rows. Moments, powers and ratios are FP64.

A GPU without Triton kernels copies the sample to the host synchronously, so CUDA graphs cannot capture it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.sample import BINS, DETAILED, LOWEST, PHASE, SAMPLED, STATS, WIDTH, SampleInput, limits, rows_at
from octavo.numerics import Format, to_codes

_SQNR = STATS.index("sqnr")
_MAXIMA = STATS.index("amax"), STATS.index("nonfinite")

Floats = NDArray[np.float32]


class _Read(NamedTuple):
    """Host copies of the inputs of the statistics of a tensor (R, C), with n sampled rows."""

    x: Floats
    """(n, C), FP32."""
    quantised: Floats
    """x * fold, the quantised values before rounding."""
    scale: Floats
    """Scale per sampled element, broadcastable to (n, C)."""
    largest: np.float32
    """Largest scale."""


def sample(operand: SampleInput, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample`."""
    written: Floats = row.cpu().numpy()
    if written[PHASE] < 0:
        return
    scales = _to_host(operand.scale).numpy()
    with np.errstate(all="ignore"):
        read = _read(operand, scales, int(written[PHASE]))
        stats = _stats(operand, read, scales)
        for column in _MAXIMA:
            stats[column] = np.fmax(stats[column], written[column])
        written[:_SQNR], written[SAMPLED] = stats, read.x.size
        if len(written) > WIDTH and written[DETAILED] > 0:
            written[_SQNR], written[WIDTH:] = _detail(operand, read)
    if not row.is_cpu:
        row.copy_(torch.from_numpy(written))


def _read(operand: SampleInput, scales: Floats, phase: int) -> _Read:
    total, cols = operand.shape
    rows = rows_at(total, phase)
    height, width = operand.target.tile.tile(total, cols)
    scale = scales[rows // height]
    scale = scale if scale.shape[1] == 1 else scale.repeat(width, axis=1)[:, :cols]
    x = _values(_to_host(operand.x) if operand.rows is not None else _rows_of(operand.x, torch.from_numpy(rows)))
    x = x * scale if operand.is_coded else x
    quantised = x if operand.fold is None else x * _values(_to_host(operand.fold))
    return _Read(x, quantised, scale, scales.max())


def _stats(operand: SampleInput, read: _Read, scales: Floats) -> list[Any]:
    """Return all of `STATS` except sqnr."""
    x, r, size = read.x, read.quantised, read.x.size
    y = r * (1 / read.scale)
    amax = _magnitude(x)
    if not amax < np.inf:  # restrict to finite elements
        finite = np.abs(x) < np.inf
        x, r, y = x[finite], r[finite], y[finite]
        amax = _magnitude(x)
    flushed, subnormal, saturated = _counts(r, np.abs(y, out=y), operand.target.fmt)
    nonfinite = (size - x.size) / size
    if operand.edges is not None:
        rows, cols = operand.shape
        nonfinite = max(nonfinite, _nonfinite_rows(_values(_to_host(operand.edges))) / (rows * cols))
    known = np.nan if operand.is_coded else 1.0
    shares = known * flushed / size, subnormal / size, known * saturated / size, nonfinite
    return [max(amax, _amax(operand, scales, read.largest)), read.largest, *shares, *_moments(x)]


def _counts(r: Floats, y: Floats, fmt: Format) -> tuple[Any, Any, Any]:
    """Return the numbers of flushed, subnormal and saturated elements."""
    zeroed, normal, largest = limits(fmt)
    small = y <= zeroed
    subnormal = np.count_nonzero(y < normal) - np.count_nonzero(small)
    flushed = np.count_nonzero(np.logical_and(small, r != 0, out=small))
    return flushed, subnormal, np.count_nonzero(y > largest)


def _moments(x: Floats) -> tuple[np.float64, np.float64, np.float64]:
    """Return mean, variance and kurtosis of finite elements; NaN if there are none."""
    number = np.float64(x.size)
    deviations = x.astype(np.float64).ravel()
    mean = deviations.sum() / number
    deviations -= mean
    deviations *= deviations
    variance = deviations.sum() / number
    deviations *= deviations  # no dot product: BLAS may synchronise threads
    return mean, variance, deviations.sum() / number / (variance * variance)


def _amax(operand: SampleInput, scales: Floats, largest: np.float32) -> np.float32:
    """Return the amax of the tile with the largest scale, at least its bound from that scale."""
    bound = np.float32(operand.bound) * largest if largest > 2.0**-126 else np.float32(0)
    if not operand.reads_tile:
        return bound
    height, width = operand.target.tile.tile(*operand.shape)
    down, across = divmod(int(scales.argmax()), scales.shape[1])
    tile = _values(_to_host(operand.x[down * height : (down + 1) * height, across * width : (across + 1) * width]))
    tile = tile * largest if operand.is_coded else tile
    tile_amax = _magnitude(tile)
    return max(bound, tile_amax if tile_amax < np.inf else _magnitude(tile[np.abs(tile) < np.inf]))


def _detail(operand: SampleInput, read: _Read) -> tuple[float, Floats]:
    """Return sqnr in dB, NaN if the error is zero or unknown, and the bins (BINS,)."""
    fmt, r, y = operand.target.fmt, read.quantised, read.quantised * (1 / read.scale)
    finite = (np.abs(read.x) < np.inf) & (np.abs(y) < np.inf)
    codes = to_codes(torch.from_numpy(y), fmt).float().numpy()
    signal, noise = (np.where(finite, part, 0.0).astype(np.float64) for part in (r, r - codes * read.scale))
    ratio = np.square(signal).sum() / np.square(noise).sum()
    known = 0 < ratio < np.inf and not operand.is_coded
    place = np.where(y == 0, 0, np.clip(np.frexp(y)[1] - 1 - LOWEST, 0, BINS - 1))
    bins = np.bincount(place[finite & (r != 0)], minlength=BINS)
    return 10 * np.log10(ratio) if known else np.nan, bins.astype(np.float32)


def _nonfinite_rows(edges: Floats) -> int:
    """Return the number of rows of (R, 2) without finite values; 0 if it is all, which the other operand causes too."""
    finite = np.isfinite(edges)
    number = 0 if finite.all() else int(np.count_nonzero(~(finite[:, 0] | finite[:, 1])))
    return number if number < len(edges) else 0


def _magnitude(x: Floats) -> np.float32:
    """Return the largest magnitude, 0 if empty; propagates NaN and infinities."""
    return np.maximum(x.max(), -x.min()) if x.size else np.float32(0)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a matrix to the host, as bytes for FP8, which PyTorch cannot index."""
    x = x.detach()
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    return bits.index_select(0, rows.to(x.device)).view(x.dtype).cpu()


def _to_host(x: Tensor) -> Tensor:
    """Copy to the host. A view would not do: storage shared with NumPy cannot be resized, as FSDP does with weights."""
    return x.detach().to("cpu", copy=True)


def _values(x: Tensor) -> Floats:
    """Convert a host tensor to FP32 in NumPy, which has neither BF16 nor FP8."""
    if x.dtype == torch.bfloat16:
        bits: NDArray[np.int32] = np.left_shift(x.view(torch.int16).numpy(), 16, dtype=np.int32)
        return bits.view(np.float32)
    values: Floats = _code_values(x.dtype)[x.view(torch.uint8).numpy()] if x.element_size() == 1 else x.float().numpy()
    return values


@cache
def _code_values(dtype: torch.dtype) -> Floats:
    """Return the values of all codes of an FP8 dtype."""
    values: Floats = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()
    return values
