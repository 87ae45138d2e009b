"""`ScalePolicy`: from the magnitudes of a tensor to its scale and the recommended format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from octavo.calibration.histogram import MagnitudeHistogram
from octavo.errors import ConfigError
from octavo.kernels.sample import limits
from octavo.nn.calibration_file import Calibrated, Statistics
from octavo.numerics import E4M3, E5M2, Format, format_named, scale_from_amax
from octavo.recipes import Operand
from octavo.recipes.spec import MOST_MARGIN

FLUSHED = 0.01
"""Largest share of a tensor's elements that a recommended scale flushes to zero."""
SATURATED = 1e-3
"""Largest share that may saturate in a tensor that fits its scale."""
LEAST = 2.0**-133
"""The smallest magnitude that a histogram distinguishes from zero."""
PERCENTILES = (1.0, 50.0, 99.0, 99.9, 99.99)
"""Percentiles of the magnitudes in a calibration file."""
FINER = "finer scales"
"""Suggested if one scale per tensor is too coarse: a recipe with a scale per row or tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePolicy:
    """Choice of a scale: the largest magnitude to represent, and headroom above it."""

    by: Literal["max", "percentile", "extreme"] = "max"
    """`max`: no observed value saturates. `percentile`: outliers saturate, so that fewer small values are flushed.
    `extreme`: the largest value to expect in `horizon` batches, by how the largest of each batch are distributed."""
    percentile: float = 99.99
    """With `percentile`: percent of non-zero elements that do not saturate."""
    horizon: float = 1000.0
    """With `extreme`: for how many batches of the calibration's size the scale has to last. A step of training with
    eight times as many tokens has eight of them."""
    margin: int = 1
    """Bits of headroom: the scale is multiplied by 2^margin, for larger values in later batches. Floating-point codes
    lose no precision by it, only the smallest values."""

    def __post_init__(self) -> None:
        if self.by not in ("max", "percentile", "extreme"):
            raise ConfigError(f"a scale is chosen by 'max', 'percentile' or 'extreme', not '{self.by}'.")
        if not self.horizon >= 1:
            raise ConfigError(f"horizon = {self.horizon}: it must be batches, at least 1.")
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile = {self.percentile}: it must be above 0, and at most 100.")
        if not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(f"margin = {self.margin}: it must be bits of headroom, 0 to {MOST_MARGIN}.")

    def __str__(self) -> str:
        by = {"percentile": f"percentile {self.percentile:g}", "extreme": f"extreme of {self.horizon:g} batches"}
        return f"{by.get(self.by, self.by)}, margin {self.margin}"

    def amax(self, seen: MagnitudeHistogram) -> float:
        """Return the magnitude that maps to the largest code without margin."""
        if self.by == "extreme":
            return seen.extrapolated(self.horizon)
        return seen.amax if self.by == "max" else seen.percentile(self.percentile)

    def scale(
        self, seen: MagnitudeHistogram, operand: Operand, together: MagnitudeHistogram | None = None
    ) -> Calibrated | None:
        """Return the scale of a tensor for an operand of a recipe; None if it was all zeros.

        Args:
            seen: histogram of the tensor.
            operand: format and scaling.
            together: histogram over all tensors that share the scale, if several do.
        """
        amax, fmt = self.amax(together or seen), format_named(operand.format)
        if amax <= 0 or not seen.batches:
            return None
        lowest = float(scale_from_amax(torch.tensor(amax, dtype=torch.float32), fmt, operand.scaling)[0])
        scale = lowest * 2.0**self.margin
        return Calibrated(
            operand.stored_format, operand.scaling, scale, seen.amax, _statistics(seen, amax, fmt, scale, lowest)
        )


def _statistics(seen: MagnitudeHistogram, amax: float, fmt: Format, scale: float, lowest: float) -> Statistics:
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


def highest_scale(seen: MagnitudeHistogram, fmt: Format) -> float | None:
    """Return the largest scale that flushes at most `FLUSHED` of a tensor to zero; None if every scale does."""
    smallest = seen.smallest(FLUSHED)
    return None if smallest is None else max(smallest, LEAST) / limits(fmt).flushed


def suggest(seen: MagnitudeHistogram, amax: float) -> str:
    """Return the narrowest format in which one scale covers all but `FLUSHED` of the elements up to `amax`."""
    for fmt in (E4M3, E5M2):
        highest = highest_scale(seen, fmt)
        if highest is None or amax / fmt.max <= highest:
            return fmt.name
    return FINER
