"""A few numbers that stand for a whole snapshot: what a tracker is sent instead of thousands of series."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AGGREGATES = {
    "fp8/flushed_max": "largest share of elements flushed to zero, of any tensor",
    "fp8/subnormal_max": "largest share of subnormal codes",
    "fp8/saturated_max": "largest share of saturated elements",
    "fp8/nonfinite_tensors": "number of tensors with a NaN or an infinity",
    "fp8/amax_max": "largest magnitude",
    "fp8/scale_log2_min": "binary logarithm of the least scale",
    "fp8/scale_log2_max": "binary logarithm of the largest scale",
    "fp8/kurtosis_max": "largest kurtosis",
    "fp8/sqnr_min": "least signal to quantisation noise in dB, in steps with histograms",
    "fp8/tensors": "tensors that were measured",
}
"""What is made of a snapshot."""
SCALARS = ("loss", "gap_percent", "gradient_norm", "lr", "tokens_per_second", "heldout_loss", "loss_scale")
"""Of the scalars, those whose names begin so go to a tracker."""


def aggregates(values: NDArray[np.float32], stats: Sequence[str]) -> dict[str, float]:
    """Return the aggregates of a snapshot (tensors, statistics), without those of which nothing was measured."""
    columns = {name: values[:, index] for index, name in enumerate(stats)}
    scales = columns["scale"][columns["scale"] > 0]
    found = {f"fp8/{name}_max": _largest(columns[name]) for name in ("flushed", "subnormal", "saturated", "amax")}
    found["fp8/kurtosis_max"] = _largest(columns["kurtosis"])
    found["fp8/sqnr_min"] = -_largest(-columns["sqnr"]) if "sqnr" in columns else math.nan
    found["fp8/nonfinite_tensors"] = float((columns["nonfinite"] > 0).sum())
    found["fp8/scale_log2_min"] = math.log2(scales.min()) if len(scales) else math.nan
    found["fp8/scale_log2_max"] = math.log2(scales.max()) if len(scales) else math.nan
    found["fp8/tensors"] = float((~np.isnan(columns["amax"])).sum())
    return {key: found[key] for key in AGGREGATES if math.isfinite(found[key])}


def _largest(column: NDArray[np.float32]) -> float:
    return float(np.fmax.reduce(column)) if len(column) else math.nan
