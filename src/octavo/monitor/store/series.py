"""Downsampling that keeps spikes: the minimum and the maximum of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Series:
    """A number over time, in buckets; for a bucket of one point, `first == last` and `low == high`."""

    first: Steps
    """(n,) first step of each bucket."""
    last: Steps
    """(n,) last step."""
    low: Values
    """(n,) minimum; NaN if all values are NaN."""
    high: Values
    """(n,) maximum."""

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


def sampled(steps: Steps, values: Values, points: int | None) -> Series:
    """Return a series of at most `points` points to draw, two per bucket; all points if None."""
    if points is None or len(steps) <= points:
        return Series(steps, steps, values, values)
    return pooled(steps, steps, values, values, starts(np.ones(len(steps)), max(points // 2, 1)))


def pooled(first: Steps, last: Steps, low: Values, high: Values, start: Steps) -> Series:
    """Merge buckets: (n, ...) to (len(start), ...), the i-th from `start[i]` on."""
    ends = np.append(start[1:], len(first)) - 1
    return Series(first[start], last[ends], np.fmin.reduceat(low, start), np.fmax.reduceat(high, start))


def starts(weights: NDArray[np.float64], buckets: int) -> Steps:
    """Return the start indices of at most `buckets` buckets of about equal weight."""
    before = np.cumsum(weights) - weights
    bucket = (before * (buckets / weights.sum())).astype(np.int64)
    return np.flatnonzero(np.diff(bucket, prepend=-1))


class Ranges(NamedTuple):
    """Snapshots, or spans of them, in order: (n,) steps and snapshot counts, (n, rows) values."""

    first: Steps
    last: Steps
    weight: Values
    low: Values
    high: Values

    @classmethod
    def of(cls, taken: Sequence[tuple[tuple[int, int, int], tuple[Floats, Floats]]], rows: int) -> Ranges:
        """Convert a list of ((first, last, count), (low, high)) to arrays."""
        numbers = np.array([numbers for numbers, _ in taken], dtype=np.int64).reshape(-1, 3)
        low, high = (
            np.array([values[end] for _, values in taken], dtype=np.float64).reshape(len(taken), rows) for end in (0, 1)
        )
        return cls(numbers[:, 0], numbers[:, 1], numbers[:, 2].astype(np.float64), low, high)

    def series(self, row: int, points: int | None) -> Series:
        """Return one row, in buckets if there are more snapshots than `points`."""
        low, high = self.low[:, row], self.high[:, row]
        if points is None or self.weight.sum() <= points:
            return Series(self.first, self.last, low, high)
        start = starts(self.weight, max(points // 2, 1))
        return pooled(self.first, self.last, low, high, start)


def gaps(covered: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the inclusive ranges of steps from `first` to `last` that `covered` leaves out."""
    gaps, start = [], first
    for low, high in sorted(covered):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return [*gaps, (start, last)] if start <= last else gaps
