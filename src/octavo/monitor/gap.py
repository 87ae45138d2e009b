"""The gap, the percentage by which the FP8 loss exceeds the BF16 baseline's, and its noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GAP_LIMIT = 1.0
"""Limit of the gap in percent where its noise is smaller."""
HARMFUL_GAP = 5 * GAP_LIMIT
"""Gap in percent beyond which a run is unhealthy."""
PARTS = 64
"""Largest number of equal parts of a run, each with its mean gap: the noise of single batches averages out."""
FEWEST = 16
"""Smallest number of gaps whose fluctuation is estimated."""
DEVIATIONS = 3.0
"""Standard deviations that count as fluctuation."""


def fluctuation(gaps: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the gap's fluctuation in percent: `DEVIATIONS` standard deviations about its trend over a run.

    Two runs that differ only by rounding drift apart and back, by several percent early in training, so a final gap
    below the fluctuation can be chance. Real harm is not excused: the deviation is a seminorm, every gap that rises
    from 0 to h without falling is a mean of steps of height h, and no step of height h fluctuates by h or more.

    Args:
        gaps: percent per batch, in the order of steps. Values that are not finite are ignored; fewer than `FEWEST`
            fluctuate by 0.
    """
    values = np.asarray(gaps, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < FEWEST:
        return 0.0
    size = -(-len(values) // PARTS)
    means = values[len(values) % size :].reshape(-1, size).mean(axis=1)
    at = np.arange(len(means))
    rest = means - np.polyval(np.polyfit(at, means, 1), at)
    return float(DEVIATIONS * np.sqrt(rest @ rest / (len(means) - 2)))
