"""Fewer points than were measured, none of the spikes lost: the least and the largest of each bucket are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Series:
    """A number over time, in buckets; a bucket of one point has `first == last` and `low == high`."""

    first: Steps
    """(n,) step of the first point of a bucket."""
    last: Steps
    """(n,) step of its last point."""
    low: Values
    """(n,) the least value; NaN where there is none but NaN."""
    high: Values
    """(n,) the largest value."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def is_exact(self) -> bool:
        """Whether every point is there."""
        return bool((self.first == self.last).all())

    def points(self) -> tuple[Steps, Values]:
        """Return a line to draw, (steps, values): the least of a bucket at its first step, the largest at its last."""
        wide = self.first != self.last
        both = np.stack([np.ones_like(wide), wide], axis=1).ravel()
        steps = np.stack([self.first, self.last], axis=1).ravel()[both]
        return steps, np.stack([self.low, self.high], axis=1).ravel()[both]


def sampled(steps: Steps, values: Values, points: int | None) -> Series:
    """Return a series of at most `points` points to draw, two a bucket; all of them where `points` is None."""
    if points is None or len(steps) <= points:
        return Series(steps, steps, values, values)
    return pooled(steps, steps, values, values, starts(np.ones(len(steps)), max(points // 2, 1)))


def pooled(first: Steps, last: Steps, low: Values, high: Values, start: Steps) -> Series:
    """Return buckets of buckets: (n, ...) become (len(start), ...), the i-th from `start[i]` on."""
    ends = np.append(start[1:], len(first)) - 1
    return Series(first[start], last[ends], np.fmin.reduceat(low, start), np.fmax.reduceat(high, start))


def starts(weights: NDArray[np.float64], buckets: int) -> Steps:
    """Return where each of at most `buckets` buckets starts, such that their weights are about alike."""
    before = np.cumsum(weights) - weights
    bucket = (before * (buckets / weights.sum())).astype(np.int64)
    return np.flatnonzero(np.diff(bucket, prepend=-1))
