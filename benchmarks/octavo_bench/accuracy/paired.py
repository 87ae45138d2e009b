"""What a difference between two recipes is worth: 95 % confidence intervals from paired measurements.

Two pairings answer two questions. Over seeds: would another seed show this difference? Over held-out sequences: are
these very weights worse, or is it the choice of text? The second has thousands of pairs, and says nothing of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and how far from it the true value may lie."""

    mean: float
    half_width: float | None
    """Of the 95 % confidence interval; None where a single pair shows no spread."""


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` degrees of freedom, to 3 decimals.

    From a table up to 10, from there by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5).
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def over_seeds(differences: Sequence[float]) -> Interval:
    """Return the mean of the differences, one a seed, with its interval.

    With two seeds Student's factor is 12.7: such an interval is wide, and honest.
    """
    if len(differences) < 2:
        return Interval(fmean(differences), None)
    error = stdev(differences) / math.sqrt(len(differences))
    return Interval(fmean(differences), student(len(differences) - 1) * error)


def over_sequences(losses: Sequence[float], reference: Sequence[float], block: int = 16) -> Interval:
    """Return the mean of `losses - reference`, paired by sequence, with its interval.

    Neighbours come from one document and are alike, so that runs of `block` sequences are taken as one observation
    each; with fewer than 8 such runs, shorter ones.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    block = max(1, min(block, len(differences) // 8))
    blocks = [fmean(differences[start : start + block]) for start in range(0, len(differences) - block + 1, block)]
    return Interval(fmean(differences), over_seeds(blocks).half_width)
