"""The largest of a family of models whose peak stays within a budget."""

from __future__ import annotations

from collections.abc import Callable


def largest(peak_of: Callable[[int], int], budget: int, *, start: int = 32, power: float = 3.0) -> int:
    """Return the largest size whose peak is within `budget` bytes; 0 if none is.

    Each peak is asked for once, and few are: the next size is the one that fits if peaks grow with its `power`.

    Args:
        peak_of: size -> bytes; larger sizes take more.
        start: the size to begin with.
    """
    low, high, size = 0, None, max(start, 1)
    while True:
        peak = peak_of(size)
        if peak <= budget:
            low = size
        else:
            high = size
        if high is not None and high - low <= 1:
            return low
        guess = int(size * (budget / peak) ** (1 / power))
        size = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
