"""What an FP8 format can hold of a tensor: the window that its histogram is drawn against."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Range(NamedTuple):
    """Magnitudes of a format, from OFP8 1.0, table 1."""

    largest: float
    smallest_normal: float
    smallest_subnormal: float


RANGES = {"e4m3": Range(448.0, 2.0**-6, 2.0**-9), "e5m2": Range(57344.0, 2.0**-14, 2.0**-16)}
"""The same figures as `octavo.numerics.formats`, which needs torch; a test compares the two."""


def window(operand: str) -> dict[str, Any] | None:
    """Return the window of a tensor quantised as `operand` says, as exponents of 2 of magnitudes over their scales:
    those from `lowest` to `highest` have a code, those from `normal` on one with the full mantissa.

    Histograms are of magnitudes over their scales too, so that a tensor of many scales has one window. None where the
    format is not known, as of a tensor that is not quantised.
    """  # noqa: D205
    name = next((name for name in RANGES if name in operand.lower()), None)
    if name is None:
        return None
    held = RANGES[name]
    return {
        "format": name,
        "lowest": math.log2(held.smallest_subnormal) - 1,  # from half of it on, values round up to it
        "normal": math.log2(held.smallest_normal),
        "highest": math.log2(held.largest),
    }


def outside(counts: NDArray[np.uint32], low: int, held: dict[str, Any]) -> tuple[float, float]:
    """Return the shares below and above a window, 0 to 1, of whole bins: bin i is of [2^(low+i), 2^(low+i+1))."""
    total = float(counts.sum())
    if not total:
        return 0.0, 0.0
    starts = low + np.arange(len(counts))
    below = counts[starts + 1 <= held["lowest"]].sum()
    above = counts[starts >= held["highest"]].sum()
    return float(below) / total, float(above) / total
