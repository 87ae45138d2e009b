"""Measurements of a step, alarms that rules raise about them, and events that report what was done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.lab.guard.parameters import ParameterStats

Row = tuple[Any, ...]
"""Identifies a row of telemetry: layer, role, and fields not used here."""


def percent_above(loss: float, baseline: float) -> float | None:
    """Return by how many percent a loss exceeds that of a baseline; None if that is 0."""
    return 100 * (loss - baseline) / abs(baseline) if baseline else None


class Observation(NamedTuple):
    """Measurements of a step, equal on all ranks."""

    step: int
    """Number of steps made, this one included."""
    loss: float
    """Loss before the update, in nats per token."""
    gradient_norm: float
    """Gradient norm before clipping."""
    lr: float
    """Learning rate of the step."""
    values: NDArray[np.float32] | None = None
    """Telemetry of the step, (tensors, `STATS`); None if the step was not sampled."""
    rows: Sequence[Row] = ()
    """The tensor that each row of `values` describes."""
    parameters: ParameterStats | None = None
    """Invariants of parameters; None if the step was not checked."""
    baseline_loss: float = math.nan
    """Loss of the BF16 baseline on the same batch; NaN without one."""

    @property
    def gap(self) -> float | None:
        """Loss above the BF16 baseline's, in percent; None without a finite baseline."""
        is_known = math.isfinite(self.loss) and math.isfinite(self.baseline_loss)
        return percent_above(self.loss, self.baseline_loss) if is_known else None


class GuardEvent(NamedTuple):
    """An observation, decision or action of guardrails."""

    step: int
    level: str
    """`info`, `warning` or `error`."""
    rule: str
    """The rule of the alarm, or `guard`."""
    text: str
    """Description."""
    action: str = ""
    """The action taken; empty for none."""
    layer: str = ""
    role: str = ""
    value: float | None = None
    limit: float | None = None
    cause: str = ""
    """One of `octavo.lab.guard.diagnosis.Cause`, if known."""
    back_to: int | None = None
    """Number of steps that still count, if the run was rolled back."""


class Alarm(NamedTuple):
    """A violation of a rule."""

    step: int
    """The step that violated it."""
    rule: str
    """A key of `octavo.lab.guard.rules.RULES`."""
    layer: str
    """Full name of the layer; empty for the whole model."""
    role: str
    """`input`, `weight` or `grad_output`; empty for the whole model."""
    value: float
    """The measured value."""
    limit: float
    """The limit of the rule."""

    def __str__(self) -> str:
        of = " ".join(filter(None, (self.layer, self.role)))
        where = f" of {of}" if of else ""
        unit = " %" if self.rule == "gap" else ""
        held = "" if self.rule == "nonfinite" else f" ({self.value:.4g}{unit}, limit {self.limit:.4g}{unit})"
        return f"{self.rule}{where}{held}"

    def event(self, text: str, **details: Any) -> GuardEvent:
        """Return the event that reports it; by default a warning, with its layer and role."""
        event = GuardEvent(self.step, "warning", self.rule, text, "", self.layer, self.role, self.value, self.limit)
        return event._replace(**details)
