"""What FP8 does to a tensor, estimated from some of its rows: the contract of `octavo.nn.telemetry`.

    sample(SampleInput(x, scale, spec), row)  writes `STATS` of one tensor into FP32 (WIDTH,), leaves codes alone
                                              with a row of (WIDTH + BINS,), a histogram of exponents too

A tensor that has just been quantised lies in the cache. `count(R)` of its R rows are read again, spread evenly, from a
place that `row[PHASE]` names: the caller changes it with every step, so that all rows are sampled alike and a
share is an unbiased estimate. Beside them all scales are read, one tile in full, that with the largest scale, and the
first and last column of a product with the tensor, where a NaN or an infinity in any of its elements must show.

    flushed, subnormal, saturated   shares of the sampled elements, of x * fold * (1 / scale)
    nonfinite                       the share of the sample; at least one element per row of the tensor that holds any
    mean, variance, kurtosis        of the sampled elements that are finite; a normal distribution has kurtosis 3
    amax                            the largest finite magnitude that was met; see `SampleInput.bound`
    scale                           the largest of all scales
    sqnr                            of r = x * fold, signal to quantisation noise in dB: 10 log10(|r|^2 / |r - q(r)|^2)
    bins                            how many elements of the sample have each exponent as the format sees them: bin i
                                    counts 2^(LOWEST+i) <= |x * fold / scale| < 2^(LOWEST+i+1), the first all that is
                                    smaller and the last all that is larger, too; neither zeros nor what is not finite

The last two cost more: they are written where `row[DETAILED]` is above 0 and the row has room for bins.

Nothing waits for the device, and with a negative `row[PHASE]` nothing is read or written: a CUDA graph may hold it.
Where the host knows that no row of a buffer is sampled (`mark_idle`), nothing is launched either, but in a capture.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.dispatch import run_twin
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import Format

STATS = ("amax", "scale", "flushed", "subnormal", "saturated", "nonfinite", "mean", "variance", "kurtosis", "sqnr")
"""What a row begins with. Shares are of elements, 0 to 1; `sqnr` is in dB."""
PHASE = len(STATS)
"""Where a row says which rows of its tensor are sampled: a whole number below 2^23, or -1 for nothing at all."""
SAMPLED = PHASE + 1
"""Where it says how many elements the shares are of."""
DETAILED = SAMPLED + 1
"""Where it says whether bins and sqnr are wanted: above 0."""
WIDTH = 16
"""FP32 values of a row without bins: 64 bytes, so that none lies unaligned."""
BINS, LOWEST = 64, -40
"""Binades of a histogram, and the exponent of the first; counts are FP32, exact as a sample has less than 2^24."""
MOST, LEAST, ONE_IN = 64, 16, 16
"""Rows that are sampled: one in 16, at least 16 and at most 64."""

LARGEST_TILE = 2**16
"""Elements of a tile that one program may read."""


class SampleInput(NamedTuple):
    """A tensor and what it was quantised with."""

    x: Tensor
    """(R, C), FP32, BF16, FP16, or codes; any strides. With `rows`, only those that are sampled, (count(rows), C)."""
    scale: Tensor
    """FP32, the scales of all tiles of (R, C)."""
    target: QuantSpec
    """What it was quantised to."""
    fold: Tensor | None = None
    """FP32 (1, C), what its columns were multiplied by before. With `rows`, also (count(rows), C): each by its own."""
    edges: Tensor | None = None
    """(R, 2): two columns of a product whose row is not finite where that of x is not."""
    tied: bool = False
    """Whether the scales are those of this tensor's own maxima, which then bound its amax."""
    rows: int | None = None
    """R, where x is only the sample."""
    is_coded: bool = False
    """Whether x holds codes, each to be multiplied by its scale. What was lost in making them is not known: flushed,
    saturated and sqnr are NaN."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C) of the tensor."""
        return self.x.shape[0] if self.rows is None else self.rows, self.x.shape[1]

    @property
    def bound(self) -> float:
        """What the largest scale times this says of the amax: it is as large at least, with FP32 scales it is this."""
        half = 0.5 if self.target.scaling == "power_of_two" else 1.0
        return half * self.target.fmt.max if self.tied and self.fold is None else 0.0

    @property
    def reads_tile(self) -> bool:
        """Whether the tile with the largest scale is read in full: it is at hand, and not a whole large tensor."""
        height, width = self.target.tile.tile(*self.shape)
        return self.rows is None and height * width <= LARGEST_TILE


class Limits(NamedTuple):
    """Magnitudes of a value over its scale at which its code changes kind, of a format, rounded to nearest even."""

    flushed: float
    """Up to this the code is zero."""
    subnormal: float
    """Below this it is subnormal."""
    saturated: float
    """Above this it is the largest, and the value was more than half a step past that."""


@cache
def limits(fmt: Format) -> Limits:
    """Return the limits of a format."""
    binade = 2.0 ** math.floor(math.log2(fmt.max))
    half = fmt.smallest_subnormal / 2
    return Limits(half, fmt.smallest_normal - half, fmt.max + fmt.epsilon * binade / 2)


def count(rows: int) -> int:
    """Return how many of a tensor's rows are sampled."""
    return min(rows, max(LEAST, min(MOST, rows // ONE_IN)))


def rows_at(rows: int, phase: int) -> NDArray[np.int64]:
    """Return which rows of a tensor are sampled where `row[PHASE]` is known, int64 (count(rows),)."""
    number = count(rows)
    return (np.arange(number) * (rows // max(number, 1)) + phase) % max(rows, 1)


def sampled_rows(rows: int, row: Tensor) -> Tensor:
    """Return which rows of a tensor are sampled, int64 (count(rows),), on the device of `row` (WIDTH,)."""
    if row.is_cpu:
        return torch.from_numpy(rows_at(rows, max(int(row.numpy()[PHASE]), 0)))
    number = count(rows)
    stride = rows // max(number, 1)
    phase = row[PHASE].long().clamp(min=0)
    return (torch.arange(number, device=row.device) * stride + phase) % max(rows, 1)


_idle: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_warming_up = 0


def mark_idle(rows: Tensor, idle: bool) -> None:
    """Set whether kernels that would sample into the buffer of these rows need no launch, as every phase is negative.

    A capture launches them all the same: its replays sample when the phase says so.
    """
    (_idle.add if idle else _idle.discard)(rows.untyped_storage())


@contextmanager
def warm_up() -> Iterator[None]:
    """Launch kernels for idle buffers too: a kernel that is launched first in a capture cannot be loaded there."""
    global _warming_up
    _warming_up += 1
    try:
        yield
    finally:
        _warming_up -= 1


def is_idle(rows: Tensor) -> bool:
    """Return whether sampling kernels for the buffer of these rows need not be launched now."""
    if _warming_up or rows.untyped_storage() not in _idle:
        return False
    return not (rows.is_cuda and torch.cuda.is_current_stream_capturing())


def sampling_off(row: Tensor) -> bool:
    """Return whether nothing is to be launched for a row, as far as the host knows without waiting."""
    return (row.is_cpu and bool(row.numpy()[PHASE] < 0)) or is_idle(row)


def sample(operand: SampleInput, row: Tensor) -> None:
    """Write `STATS` and the size of the sample into a row. Of a row that is written twice, amax and nonfinite grow.

    Args:
        row: FP32 (WIDTH,) or (WIDTH + BINS,), contiguous, on the device of x.

    Raises:
        ConfigError: the row is something else.
    """
    _check(operand, row)
    if 0 not in operand.shape and not sampling_off(row):
        run_twin("sample.sample", operand.x, (operand, row), "telemetry")


def _check(operand: SampleInput, row: Tensor) -> None:
    fits = row.dim() == 1 and row.shape[0] in (WIDTH, WIDTH + BINS) and row.is_contiguous()
    if not fits or (row.dtype, row.device) != (torch.float32, operand.x.device):
        raise ConfigError(
            f"telemetry of a tensor on {operand.x.device} is to be written to {row.dtype} {tuple(row.shape)} on "
            f"{row.device}, not FP32 ({WIDTH},) or ({WIDTH + BINS},) there: move the model first, then make its "
            "octavo.nn.Telemetry."
        )
