"""The telemetry contract: FP8 quantisation statistics of a tensor from sampled rows, for `octavo.nn.telemetry`.

    sample(SampleInput(x, scale, spec), row)  writes `STATS` of one tensor to FP32 (WIDTH,); codes are unchanged;
                                              to FP32 (WIDTH + BINS,), also a histogram of exponents

A tensor just quantised is in the cache. `count(R)` of its R rows, evenly spaced from an offset `row[PHASE]`, are read
again; the caller changes the phase every step, so that all rows are sampled equally and fractions are unbiased
estimates. Also read are all scales, the tile with the largest scale in full, and the first and last column of a product
with the tensor, which expose a NaN or infinity in any element. Where they are non-finite in every row, the cause may be
the other operand, such as one token: then the sample alone counts.

    flushed, subnormal, saturated   fractions of the sampled elements x * fold * (1 / scale)
    nonfinite                       fraction of the sample; at least one element per row of the tensor that has any,
                                    as long as one row has none
    mean, variance, kurtosis        of the finite sampled elements; a normal distribution has kurtosis 3
    amax                            largest finite magnitude read; see `SampleInput.bound`
    scale                           largest scale
    sqnr                            signal to quantisation noise of r = x * fold, in dB: 10 log10(|r|^2 / |r - q(r)|^2)
    bins                            sampled elements per exponent after scaling: bin i counts
                                    2^(LOWEST+i) <= |x * fold / scale| < 2^(LOWEST+i+1); the first and last bins also
                                    count smaller and larger magnitudes; zeros and non-finite values are excluded

The last two cost more: they are written if `row[DETAILED]` is above 0 and the row has room for bins.

No synchronisation with the device. A negative `row[PHASE]` disables reads and writes, so that CUDA graphs can contain
the launch. If the host knows that no row of a buffer is sampled (`mark_idle`), the launch is skipped, except in a
capture.
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
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.host_state import switched
from octavo.kernels.runtime.tape import recorder_here
from octavo.numerics import Format

STATS = ("amax", "scale", "flushed", "subnormal", "saturated", "nonfinite", "mean", "variance", "kurtosis", "sqnr")
"""Leading columns of a row. Fractions of elements are from 0 to 1; `sqnr` is in dB."""
PHASE = len(STATS)
"""Column with the sampling phase: an integer below 2^23 selects the sampled rows, -1 disables sampling."""
SAMPLED = PHASE + 1
"""Column with the number of sampled elements, the denominator of the fractions."""
DETAILED = SAMPLED + 1
"""Column that requests bins and sqnr if above 0."""
WIDTH = 16
"""FP32 values of a row without bins: 64 bytes, to keep rows aligned."""
BINS, LOWEST = 64, -40
"""Number of histogram bins and exponent of the first. Counts are FP32, exact as samples are smaller than 2^24."""
MOST, LEAST, ONE_IN = 64, 16, 16
"""Sampled rows: one in 16, at least 16 and at most 64."""

LARGEST_TILE = 2**16
"""Maximum tile size in elements that one program reads."""


class SampleInput(NamedTuple):
    """A tensor and its quantisation."""

    x: Tensor
    """(R, C), FP32, BF16, FP16, or codes; any strides. With `rows`, only the sampled rows, (count(rows), C)."""
    scale: Tensor
    """FP32, scales of all tiles of (R, C)."""
    target: QuantSpec
    """Quantisation target. A rotation is applied already: x holds the rotated rows."""
    fold: Tensor | None = None
    """FP32 (1, C), factors applied to columns before quantisation. With `rows`, also (count(rows), C), per row."""
    edges: Tensor | None = None
    """(R, 2): two columns of a product; a row is non-finite where that of x is, and all are where the other operand is
    non-finite for both columns."""
    tied: bool = False
    """Whether scales are computed from the current amax, and hence bound it."""
    rows: int | None = None
    """R, if x holds only the sampled rows."""
    is_coded: bool = False
    """Whether x holds codes, to be dequantised with `scale`. Their rounding error is unknown: flushed, saturated and
    sqnr are NaN."""

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C) of the tensor."""
        return self.x.shape[0] if self.rows is None else self.rows, self.x.shape[1]

    @property
    def bound(self) -> float:
        """Lower bound of the amax in units of the largest scale; exact for FP32 scales, 0 if unknown."""
        half = 0.5 if self.target.scaling == "power_of_two" else 1.0
        return half * self.target.fmt.max if self.tied and self.fold is None else 0.0

    @property
    def reads_tile(self) -> bool:
        """Whether the tile with the largest scale is read in full: x holds all rows, and the tile is not too large."""
        height, width = self.target.tile.tile(*self.shape)
        return self.rows is None and height * width <= LARGEST_TILE


class Limits(NamedTuple):
    """Thresholds of |value / scale| for the codes of a format, for rounding to nearest even."""

    flushed: float
    """Largest magnitude that underflows to zero."""
    subnormal: float
    """Magnitudes below it become subnormal or zero."""
    saturated: float
    """Magnitudes above it saturate, more than half a step beyond the largest value."""


@cache
def limits(fmt: Format) -> Limits:
    """Return the thresholds of a format. In an integer format every value has full precision: none is subnormal."""
    if fmt.is_integer:
        return Limits(0.5, 0.5, fmt.max + 0.5)
    binade = 2.0 ** math.floor(math.log2(fmt.max))
    half = fmt.smallest_subnormal / 2
    return Limits(half, fmt.smallest_normal - half, fmt.max + fmt.epsilon * binade / 2)


def count(rows: int) -> int:
    """Return the number of sampled rows of a tensor with `rows` rows."""
    return min(rows, max(LEAST, min(MOST, rows // ONE_IN)))


def rows_at(rows: int, phase: int) -> NDArray[np.int64]:
    """Return the indices of the sampled rows for a phase known on the host, int64 (count(rows),)."""
    number = count(rows)
    return (np.arange(number) * (rows // max(number, 1)) + phase) % max(rows, 1)


def sampled_rows(rows: int, row: Tensor) -> Tensor:
    """Return the indices of the sampled rows, int64 (count(rows),), on the device of `row` (WIDTH,)."""
    if row.is_cpu:
        return torch.from_numpy(rows_at(rows, max(int(row.numpy()[PHASE]), 0)))
    number = count(rows)
    stride = rows // max(number, 1)
    phase = row[PHASE].long().clamp(min=0)
    return (torch.arange(number, device=row.device) * stride + phase) % max(rows, 1)


_idle: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Memory of telemetry buffers of which no row is sampled."""


def mark_idle(rows: Tensor, idle: bool) -> None:
    """Set whether to skip sampling launches for the buffer of these rows, as all of its phases are negative.

    A capture launches regardless: its replays sample depending on the phase.
    """
    (_idle.add if idle else _idle.discard)(rows.untyped_storage())


@contextmanager
def warm_up() -> Iterator[None]:
    """Launch kernels for idle buffers too: a kernel must be loaded before a capture, by a first launch."""
    with switched(warming_up=True):
        yield


def is_idle(rows: Tensor) -> bool:
    """Return whether to skip sampling launches for the buffer of these rows now."""
    if host_state.now.warming_up or rows.untyped_storage() not in _idle:
        return False
    return not (rows.is_cuda and torch.cuda.is_current_stream_capturing())


def sampling_off(row: Tensor) -> bool:
    """Return whether to skip the launch for a row, as far as known to the host without synchronisation.

    What is being recorded then lacks a launch that a step with samples needs, so it is not recorded.
    """
    if not ((row.is_cpu and bool(row.numpy()[PHASE] < 0)) or is_idle(row)):
        return False
    if (recorder := recorder_here()) is not None:
        recorder.postpone()
    return True


def sample(operand: SampleInput, row: Tensor) -> None:
    """Write `STATS` and the sample size to a row. Over repeated writes, amax and nonfinite keep their maximum.

    Args:
        row: FP32 (WIDTH,) or (WIDTH + BINS,), contiguous, on the device of x.

    Raises:
        ConfigError: a row of another shape, dtype or device.
    """
    _check(operand, row)
    if 0 not in operand.shape and not sampling_off(row):
        run_kernel("sample.sample", operand.x, (operand, row), "telemetry")


def _check(operand: SampleInput, row: Tensor) -> None:
    fits = row.dim() == 1 and row.shape[0] in (WIDTH, WIDTH + BINS) and row.is_contiguous()
    if not fits or (row.dtype, row.device) != (torch.float32, operand.x.device):
        raise ConfigError(
            f"telemetry of a tensor on {operand.x.device} needs a row FP32 ({WIDTH},) or ({WIDTH + BINS},) there, got "
            f"{row.dtype} {tuple(row.shape)} on {row.device}: move the model first, then create its "
            "octavo.nn.Telemetry."
        )
