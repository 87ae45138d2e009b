"""Queries on the telemetry of a step: execution order of its rows, first difference, layers harmed most."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.sample import STATS
from octavo.lab.guard.alarms import Row

AMAX, NONFINITE, SATURATED, FLUSHED, VARIANCE = map(
    STATS.index, ("amax", "nonfinite", "saturated", "flushed", "variance")
)
"""Columns of the telemetry."""


def layer_of(parameter: str) -> str:
    """Return the layer that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def forward_first(rows: Sequence[Row]) -> list[int]:
    """Return row indices in execution order: inputs and weights forward, then gradients backward."""
    order = {layer: number for number, (layer, *_) in enumerate(rows)}
    forward = [number for number, row in enumerate(rows) if not row[1].startswith("grad")]
    backward = [number for number, row in enumerate(rows) if row[1].startswith("grad")]
    return forward + sorted(backward, key=lambda number: -order[rows[number][0]])


def first_difference(
    rows: Sequence[Row], before: NDArray[np.float32], after: NDArray[np.float32]
) -> tuple[str, str] | None:
    """Return layer and role of the first tensor that differs between two runs of the same step.

    A difference is at least a factor of two in the largest magnitude: kernels may sum in another order.
    """
    for number in forward_first(rows):
        old, new = before[number], after[number]
        low, high = sorted((float(old[AMAX]), float(new[AMAX])))
        if (old[NONFINITE] > 0) != (new[NONFINITE] > 0) or (low > 0 and high > 2 * low):
            layer, role = rows[number][:2]
            return _first_gradient(rows, before, after) if role == "grad_weight" else (layer, role)
    return None


def _first_gradient(
    rows: Sequence[Row], before: NDArray[np.float32], after: NDArray[np.float32]
) -> tuple[str, str] | None:
    """Return the weight whose gradient differs most. Clipping has scaled those of all weights by one factor."""
    numbers = [number for number, row in enumerate(rows) if row[1] == "grad_weight"]
    infinite = [number for number in numbers if before[number, NONFINITE] > 0]
    if infinite:
        return (rows[infinite[0]][0], "grad_weight") if len(infinite) == 1 else None
    most = max(numbers, key=lambda number: before[number, AMAX] / max(after[number, AMAX], 1e-30))
    return rows[most][0], "grad_weight"


def worst_layers(rows: Sequence[Row], values: NDArray[np.float32] | None) -> list[str]:
    """Return the layers harmed by FP8 in a step, the worst first: non-finite, then saturated and flushed."""
    if values is None:
        return []
    harm: dict[str, float] = {}
    for (layer, *_), row in zip(rows, values, strict=True):
        shares = [float(row[column]) for column in (NONFINITE, SATURATED, FLUSHED)]
        known = [0.0 if math.isnan(share) else share for share in shares]
        harm[layer] = max(harm.get(layer, 0.0), 1e6 * (known[0] > 0) + 10 * known[1] + known[2])
    return sorted((layer for layer in harm if harm[layer] > 0), key=lambda layer: -harm[layer])
