"""The measurements of past steps that the rules compare a step with."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.lab.guard.alarms import Observation, Row
from octavo.lab.guard.telemetry_rows import AMAX, VARIANCE

PAST = 32
"""Steps of loss and gradient norm that spikes are measured against."""
LEAST = 8
"""Steps of history needed before anything is called a spike."""
TAIL = 256
"""Excesses of the loss over its level that the tail of its distribution is estimated from."""
RECENT, BEFORE = 16, 46
"""Steps that the drift of the loss compares; half as many recent ones, too, for faster drifts."""
SHORT = 4
"""Steps whose mean is compared by the other slow rules."""
CHECKS = 16
"""Checks of parameters that are remembered; 3 are needed."""
SETTLED = 16
"""Learning rates that are remembered."""


@dataclass
class History:
    """Measurements of past steps without an alarm, and counts of alarms. Part of a checkpoint, but for `lrs`."""

    losses: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    """Loss above its level."""
    norms: list[float] = field(default_factory=list)
    """Gradient norms."""
    gaps: list[float] = field(default_factory=list)
    """Loss above that of the BF16 baseline, in percent."""
    variances: list[NDArray[np.float64]] = field(default_factory=list)
    """Result of `log_variances` by step."""
    weights: dict[str, float] = field(default_factory=dict)
    """By layer: largest element of its weight."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """By parameter: its change per step and learning rate, by check."""
    second: dict[str, float] = field(default_factory=dict)
    """By parameter: norm of its second moment."""
    top_lr: float = 0.0
    """Largest learning rate at a check of parameters."""
    lrs: list[float] = field(default_factory=list)
    """Learning rates of the last steps, also of those with an alarm."""
    over: dict[str, int] = field(default_factory=dict)
    """By budget: consecutive steps above its limit."""
    lasting: dict[str, int] = field(default_factory=dict)
    """By rule: consecutive alarms."""
    last_alarm: dict[str, int] = field(default_factory=dict)
    """By rule, layer and role: step of the last alarm."""
    reported: dict[str, list[int]] = field(default_factory=dict)
    """By rule, or by budget: steps of the last alarms that were reported."""

    def remember(self, seen: Observation) -> None:
        """Add a step, unless its loss or gradient norm is not finite."""
        if not (math.isfinite(seen.loss) and math.isfinite(seen.gradient_norm)):
            return
        if len(self.losses) >= LEAST:
            excess = max(seen.loss - median(self.losses[-LEAST:]), 0.0)
            self.excess = [*self.excess, excess][-TAIL:]
        self.losses = [*self.losses, seen.loss][-RECENT - BEFORE :]
        self.norms = [*self.norms, seen.gradient_norm][-PAST:]
        self.weights.update(weight_amax(seen))
        if seen.gap is not None:
            self.gaps = [*self.gaps, seen.gap][-SHORT - BEFORE :]
        if seen.values is not None:
            self.variances = [*self.variances, log_variances(seen.values, seen.rows)][-SHORT - BEFORE :]
        if seen.parameters is not None:
            for name, rate in self.rates_of(seen):
                self.rates[name] = [*self.rates.get(name, ()), rate][-CHECKS:]
            second = zip(seen.parameters.names, map(float, seen.parameters.second), strict=True)
            self.second = {name: value for name, value in second if math.isfinite(value)}
            self.top_lr = max(self.top_lr, seen.lr)

    def forget(self, names: Sequence[str]) -> None:
        """Empty some fields: what they hold is no longer usual."""
        empty = History()
        for name in names:
            setattr(self, name, getattr(empty, name))

    def rates_of(self, seen: Observation) -> Iterator[tuple[str, float]]:
        """Yield the change of each parameter per step and learning rate; a rate never used before counts as the top."""
        found = seen.parameters
        if found is None or not found.steps or seen.lr <= 0:
            return
        lr = min(seen.lr, self.top_lr) if self.top_lr else seen.lr
        for name, change in zip(found.names, found.change, strict=True):
            if math.isfinite(change):
                yield name, float(change) / (found.steps * lr)

    @property
    def settled_lrs(self) -> list[float]:
        """The last learning rates, without those of a warm-up, in which every step has a higher one."""
        end = next((end for end, (a, b) in enumerate(pairwise(self.lrs), 1) if b <= a), len(self.lrs))
        return self.lrs[end:]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy as JSON values."""
        state = {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in ("lrs", "variances")}
        variances = [[value if math.isfinite(value) else None for value in row.tolist()] for row in self.variances]
        return {**state, "variances": variances}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; fields that a checkpoint of an older version lacks are left as they are.

        Learning rates start empty: those of steps that were undone would look like the end of a warm-up.
        """
        for name in {each.name for each in dataclasses.fields(self)} & state.keys():
            setattr(self, name, copy.deepcopy(state[name]))
        self.variances = [np.asarray(row, dtype=np.float64) for row in state.get("variances", ())]
        self.lrs = []


def weight_amax(seen: Observation) -> Iterator[tuple[str, float]]:
    """Yield the largest element of each layer's weight."""
    if seen.values is None:
        return
    for (layer, role, *_), values in zip(seen.rows, seen.values, strict=True):
        if role == "weight" and values[AMAX] > 0:
            yield layer, float(values[AMAX])


def log_variances(values: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return the log variance of each tensor, then the median of those of weight gradients.

    Clipping scales all weight gradients by one factor, which would hide a wrong one: they are relative to the median.
    """
    logs: NDArray[np.float64] = np.log(np.clip(values[:, VARIANCE].astype(np.float64), 1e-300, 1e300))
    gradients = [number for number, row in enumerate(rows[: len(logs)]) if row[1] == "grad_weight"]
    if not gradients:
        return logs
    middle = np.median(logs[gradients])
    logs[gradients] -= middle
    return np.append(logs, middle)
