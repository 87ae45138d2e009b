"""`sample` on a CPU: a few calls of NumPy for the many of PyTorch, and most of them later.

What is read of a tensor is little. Beside a product even the code that reads it has left the cache, and each call costs
several times what it computes. So `sample_soon` copies what the figures are made of, in as few calls as can be, and
`settle` makes those of a whole step, one after another. A look at a value is free on a CPU: what is rare costs only
where it is there.

Figures are those of the definition (`octavo.kernels.reference.sample`), moments up to the order of their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.reference.sample import detail
from octavo.kernels.sample import DETAILED, PHASE, SAMPLED, STATS, WIDTH, SampleInput, held, limits, rows_at
from octavo.numerics import Format

MOST_HELD = 2**26
"""Bytes of samples that wait for `settle`; with more, it is called."""
_SQNR = STATS.index("sqnr")
_GROWING = STATS.index("amax"), STATS.index("nonfinite")

Floats = NDArray[np.float32]


class Read(NamedTuple):
    """What the figures of a tensor (R, C) are made of, n rows of it sampled: copies, which nobody else changes.

    NumPy sees nothing but copies: a storage that it has seen can never be resized, as FSDP does with weights.
    """

    looked: SampleInput
    """Its x holds the sampled rows, (n, C)."""
    rows: NDArray[np.int64]
    """Which these are, (n,)."""
    elements: int
    """R C."""
    place: int
    """The index of the largest scale."""
    tile: Tensor | None
    """The values that it is of."""


def sample(looked: SampleInput, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample`."""
    written: Floats = row.numpy()
    _write(_read(looked, int(written[PHASE])), written)
    if len(written) > WIDTH and written[DETAILED] > 0:
        row[_SQNR : _SQNR + 1], row[WIDTH:] = detail(looked, row)


def sample_soon(looked: SampleInput, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample_soon`."""
    written: Floats = row.numpy()
    if written[DETAILED] > 0:
        sample(looked, row)
    elif written[PHASE] >= 0:
        read = _read(looked, int(written[PHASE]))
        soon(partial(_write, read, written), read.looked.x.nbytes)


def soon(work: Callable[[], None], size: int = 0) -> None:
    """See `octavo.kernels.sample.soon`.

    Args:
        size: bytes that it holds.
    """
    _waiting.append(work)
    if len(_waiting) * size > MOST_HELD:
        settle()


def settle() -> None:
    """See `octavo.kernels.sample.settle`."""
    waiting = _waiting[:]
    del _waiting[: len(waiting)]
    for work in waiting:
        work()


_waiting: list[Callable[[], None]] = []


def _read(looked: SampleInput, phase: int) -> Read:
    total, cols = looked.shape
    height, width = looked.target.tile.tile(total, cols)
    scale, (fold, edges) = held(looked.scale), (None if x is None else held(x) for x in looked[3:5])
    place = int(scale.detach().numpy().argmax())
    (rows, index), x, tile = _rows_and_one(total, phase), looked.x, None
    if looked.rows is None:
        x = x.view(torch.uint8) if x.element_size() == 1 else x  # PyTorch has no index of FP8 tensors
        if height == 1 and width == cols:  # the tile is one row more
            index = index.copy()
            index[-1] = place
            x = x.index_select(0, torch.from_numpy(index))
            x, tile = x[:-1], x[-1:]
        else:
            down, across = divmod(place, scale.shape[1])
            if looked.reads_tile:
                tile = held(x[down * height : (down + 1) * height, across * width : (across + 1) * width])
            x = x.index_select(0, torch.from_numpy(rows))
        tile = tile.view(looked.x.dtype) if tile is not None and looked.reads_tile else None
    kept = looked._replace(x=x.view(looked.x.dtype), scale=scale, fold=fold, edges=edges)
    return Read(kept, rows, total * cols, place, tile)


@lru_cache(maxsize=64)  # the tensors of a step have few heights
def _rows_and_one(total: int, phase: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which rows are sampled, (n,), and a copy with room for one more, (n + 1,)."""
    rows = rows_at(total, phase)
    return rows, np.append(rows, 0)


def _write(read: Read, row: Floats) -> None:
    with np.errstate(all="ignore"):
        found = _stats(read)
        for grows in _GROWING:
            if row[grows] > found[grows]:  # not where it is NaN, as it is before the first
                found[grows] = row[grows]
        row[:_SQNR] = found
    row[SAMPLED] = read.looked.x.numel()


def _stats(read: Read) -> list[Any]:
    """Return all of `STATS` but sqnr."""
    x_, scales_, target, fold, edges, *_, is_coded = read.looked
    x, scales = _values(x_), scales_.detach().numpy()
    largest, scale = scales.flat[read.place], _scale_of_each(read, scales)
    x = x * scale if is_coded else x
    r = x if fold is None else x * fold.detach().numpy()
    y = r * (1 / scale)
    size, amax = x.size, _magnitude(x)
    if not amax < np.inf:  # all that follows is of what is finite
        finite = np.abs(x) < np.inf
        x, r, y = x[finite], r[finite], y[finite]
        amax = _magnitude(x)
    flushed, subnormal, saturated = _counts(r, np.abs(y, out=y), target.fmt)
    broken = (size - x.size) / size
    if edges is not None:
        broken = max(broken, _lost(_values(edges)) / read.elements)
    known = np.nan if is_coded else 1.0
    shares = known * flushed / size, subnormal / size, known * saturated / size, broken
    return [max(amax, _amax(read, largest)), largest, *shares, *_moments(x)]


def _scale_of_each(read: Read, scales: Floats) -> Floats:
    """Return the scale of each sampled element, broadcastable to (n, C)."""
    cols = read.looked.x.shape[1]
    height, width = read.looked.target.tile.tile(read.elements // cols, cols)
    scale = scales[read.rows // height]
    return scale if scale.shape[1] == 1 else scale.repeat(width, axis=1)[:, :cols]


def _counts(r: Floats, y: Floats, fmt: Format) -> tuple[Any, Any, Any]:
    """Return how many elements are flushed, subnormal and saturated."""
    zeroed, normal, largest = limits(fmt)
    small = y <= zeroed
    subnormal = np.count_nonzero(y < normal) - np.count_nonzero(small)
    flushed = np.count_nonzero(np.logical_and(small, r != 0, out=small))
    return flushed, subnormal, np.count_nonzero(y > largest)


def _moments(x: Floats) -> tuple[np.float64, np.float64, np.float64]:
    """Return mean, variance and kurtosis of finite elements: NaN of none."""
    number = np.float64(x.size)
    off = x.astype(np.float64).ravel()
    mean = off.sum() / number
    off -= mean
    off *= off
    variance = off.sum() / number
    off *= off  # no dot product: that may wait for the threads of a BLAS
    return mean, variance, off.sum() / number / (variance * variance)


def _amax(read: Read, largest: np.float32) -> np.float32:
    """Return the largest magnitude under the largest scale, or what that scale says of it."""
    bound = np.float32(read.looked.bound) * largest if largest > 2.0**-126 else np.float32(0)
    if read.tile is None:
        return bound
    tile = _values(read.tile)
    tile = tile * largest if read.looked.is_coded else tile
    met = _magnitude(tile)
    return max(bound, met if met < np.inf else _magnitude(tile[np.abs(tile) < np.inf]))


def _lost(edges: Floats) -> int:
    """Return how many rows (R, 2) hold nothing finite."""
    finite = np.isfinite(edges)
    return 0 if finite.all() else int(np.count_nonzero(~(finite[:, 0] | finite[:, 1])))


def _magnitude(x: Floats) -> np.float32:
    """Return the largest magnitude, 0 of nothing; NaN or infinite where any element is."""
    return np.maximum(x.max(), -x.min()) if x.size else np.float32(0)


def _values(x: Tensor) -> Floats:
    """Return a tensor as FP32 of NumPy, which knows neither BF16 nor FP8."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        bits: NDArray[np.int32] = np.left_shift(x.view(torch.int16).numpy(), 16, dtype=np.int32)
        return bits.view(np.float32)
    found: Floats = _decoded(x.dtype)[x.view(torch.uint8).numpy()] if x.element_size() == 1 else x.float().numpy()
    return found


@cache
def _decoded(dtype: torch.dtype) -> Floats:
    """Return the values of all codes of a format."""
    values: Floats = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    return values
