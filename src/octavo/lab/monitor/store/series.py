"""Downsampling that keeps spikes: the minimum and the maximum of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Series:
    """A number over time, or several, in buckets; for a bucket of one point, `first == last` and `low == high`."""

    first: Steps
    """(n,) first step of each bucket."""
    last: Steps
    """(n,) last step."""
    low: Values
    """(n,) or (n, numbers) minimum; NaN if all values are NaN."""
    high: Values
    """Maximum."""
    weight: Values | None = None
    """(n,) snapshots of each bucket; None for one."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]]) -> Series:
        """Convert (first, last, low, high) of each bucket; None is NaN."""
        first, last, low, high = zip(*rows, strict=True) if rows else ((), (), (), ())
        steps = np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)
        return cls(*steps, np.array(low, dtype=np.float64), np.array(high, dtype=np.float64))

    def __len__(self) -> int:
        return len(self.first)

    @property
    def is_exact(self) -> bool:
        """True if no points were merged."""
        return bool((self.first == self.last).all())

    def points(self) -> tuple[Steps, Values]:
        """Return a line to draw, (steps, values): each bucket's minimum at its first step, its maximum at its last."""
        wide = self.first != self.last
        both = np.stack([np.ones_like(wide), wide], axis=1).ravel()
        steps = np.stack([self.first, self.last], axis=1).ravel()[both]
        return steps, np.stack([self.low, self.high], axis=1).ravel()[both]

    def number(self, index: int) -> Series:
        """Return one of several numbers."""
        return replace(self, low=self.low[:, index], high=self.high[:, index])

    def drawn(self, points: int | None) -> Series:
        """Return the series in at most `points` points to draw, two per bucket; all points if None."""
        count = len(self) if self.weight is None else self.weight.sum()
        return self if points is None or count <= points else self.pooled(max(points // 2, 1))

    def pooled(self, buckets: int) -> Series:
        """Return the series merged to at most `buckets` buckets of about equal weight."""
        if not len(self):
            return self
        start = starts(np.ones(len(self)) if self.weight is None else self.weight, buckets)
        ends = np.append(start[1:], len(self)) - 1
        low, high = np.fmin.reduceat(self.low, start), np.fmax.reduceat(self.high, start)
        return Series(self.first[start], self.last[ends], low, high)


def starts(weights: NDArray[np.float64], buckets: int) -> Steps:
    """Return the start indices of at most `buckets` buckets of about equal weight."""
    before = np.cumsum(weights) - weights
    bucket = (before * (buckets / weights.sum())).astype(np.int64)
    return np.flatnonzero(np.diff(bucket, prepend=-1))


def gaps(covered: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the inclusive ranges of steps from `first` to `last` that `covered` leaves out."""
    gaps, start = [], first
    for low, high in sorted(covered):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return [*gaps, (start, last)] if start <= last else gaps
