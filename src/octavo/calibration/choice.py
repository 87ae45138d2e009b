"""From what was seen of a tensor to its scale, and to what is recommended for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from octavo.calibration.spectrum import Spectrum
from octavo.errors import ConfigError
from octavo.kernels.sample import limits
from octavo.nn.calibration import Calibrated, Statistics
from octavo.numerics import E4M3, E5M2, Format, format_named, scale_from_amax
from octavo.recipes import Operand
from octavo.recipes.spec import MOST_MARGIN

FLUSHED = 0.01
"""Share of a tensor's elements that a recommended scale flushes to zero, at most."""
SATURATED = 1e-3
"""Share that may saturate before a tensor does not fit its scale."""
LEAST = 2.0**-133
"""The smallest magnitude that a `Spectrum` tells from zero."""
PERCENTILES = (1.0, 50.0, 99.0, 99.9, 99.99)
"""Which percentiles of the magnitudes a calibration file keeps."""
FINER = "finer scales"
"""What is suggested where one scale a tensor is too few: a recipe with a scale a row or a tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a scale is chosen: a largest magnitude that it must hold, and room above."""

    by: Literal["max", "percentile"] = "max"
    """`max`: nothing that was seen saturates. `percentile`: outliers do, and the rest is further from being flushed."""
    percentile: float = 99.99
    """With `percentile`: so many percent of the elements that are not zero do not saturate."""
    margin: int = 1
    """Bits of headroom: the scale is multiplied by 2^margin, so that later batches may be larger. A floating-point code
    loses no precision by it, only the smallest values."""

    def __post_init__(self) -> None:
        if self.by not in ("max", "percentile"):
            raise ConfigError(f"a scale is chosen by 'max' or 'percentile', not '{self.by}'.")
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile = {self.percentile}: it must be above 0, and at most 100.")
        if not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(f"margin = {self.margin}: it is bits of headroom, 0 to {MOST_MARGIN}.")

    def __str__(self) -> str:
        by = "max" if self.by == "max" else f"percentile {self.percentile:g}"
        return f"{by}, margin {self.margin}"

    def amax(self, seen: Spectrum) -> float:
        """Return the magnitude that becomes the largest code, if there is no margin."""
        return seen.amax if self.by == "max" else seen.percentile(self.percentile)

    def scale(self, seen: Spectrum, operand: Operand, together: Spectrum | None = None) -> Calibrated | None:
        """Return the scale of a tensor for an operand of a recipe; None: nothing but zeros was seen.

        Args:
            together: of all tensors that it shares the scale with, its own included.
        """
        amax, fmt = self.amax(together or seen), format_named(operand.format)
        if amax <= 0 or not seen.batches:
            return None
        lowest = _scale(amax, fmt, operand)
        scale = lowest * 2.0**self.margin
        return Calibrated(
            operand.format, operand.scaling, scale, seen.amax, _statistics(seen, amax, fmt, scale, lowest)
        )


def _scale(amax: float, fmt: Format, operand: Operand) -> float:
    return float(scale_from_amax(torch.tensor(amax, dtype=torch.float32), fmt, operand.scaling)[0])


def _statistics(seen: Spectrum, amax: float, fmt: Format, scale: float, lowest: float) -> Statistics:
    bounds, batches = limits(fmt), seen.batch_amax()
    flushed = seen.below(scale * bounds.flushed, inclusive=True)
    return Statistics(
        elements=seen.elements,
        batches=seen.batches,
        zero=seen.zero,
        flushed=flushed,
        subnormal=seen.below(scale * bounds.subnormal) - flushed,
        saturated=seen.above(scale * bounds.saturated),
        percentiles={f"{percent:g}": seen.percentile(percent) for percent in PERCENTILES},
        batch_amax=(min(batches), float(np.median(batches))),
        lowest=lowest,
        highest=highest_scale(seen, fmt),
        suggested=suggest(seen, amax),
    )


def highest_scale(seen: Spectrum, fmt: Format) -> float | None:
    """Return the largest scale that flushes at most `FLUSHED` of a tensor to zero; None: every scale does."""
    smallest = seen.smallest(FLUSHED)
    return None if smallest is None else max(smallest, LEAST) / limits(fmt).flushed


def suggest(seen: Spectrum, amax: float) -> str:
    """Return the narrowest format in which one scale holds all from `FLUSHED` of the elements up to `amax`."""
    for fmt in (E4M3, E5M2):
        highest = highest_scale(seen, fmt)
        if highest is None or amax / fmt.max <= highest:
            return fmt.name
    return FINER
