"""Rules: from the measurements of a step to alarms. Deterministic: the same measurements raise the same alarms.

Sudden faults raise an `Alarm` at once (`AlarmRules.check`): a non-finite value, a spike of the loss or gradient norm,
a weight that no update can have produced. Gradual ones have a budget (`AlarmRules.over_budget`): a share of flushed or
saturated elements above its limit for several consecutive steps.

Only steps that raised no alarm become the history that later steps are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.guard.config import GuardConfig
from octavo.kernels.sample import STATS

PAST = 32
"""Steps of loss and gradient-norm history."""
LEAST = 8
"""Steps of history needed before anything is called a spike."""
LEAST_RISE = 0.05
"""Smallest rise of the loss that is a spike, as a share of the median, however quiet the run was."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
UPDATE = 100.0
"""Bound on the change of an element per step, in learning rates: AdamW's is (1 - b1) / sqrt(1 - b2)."""
_AMAX, _NONFINITE, _SATURATED, _FLUSHED = (STATS.index(s) for s in ("amax", "nonfinite", "saturated", "flushed"))

Row = tuple[Any, ...]
"""Identifies a row of telemetry: layer, role, and fields not used here."""


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


class Alarm(NamedTuple):
    """A violation of a rule."""

    step: int
    """The step that violated it."""
    rule: str
    """`nonfinite`, `loss spike`, `gradient spike`, `weight jump`, `saturated` or `flushed`."""
    layer: str
    """Full name of the layer; empty for the whole model."""
    role: str
    """`input`, `weight` or `grad_output`; empty for the whole model."""
    value: float
    """The measured value."""
    limit: float
    """The limit of the rule."""

    def __str__(self) -> str:
        where = f" of {self.layer} {self.role}".rstrip() if self.layer else ""
        held = "" if self.rule == "nonfinite" else f" ({self.value:.4g}, limit {self.limit:.4g})"
        return f"{self.rule}{where}{held}"


class AlarmRules:
    """The rules and their history."""

    def __init__(self, config: GuardConfig, rows: Sequence[Row] = ()) -> None:
        self._config = config
        self.rows = rows
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._weights: dict[str, float] = {}
        self._over: dict[str, int] = {}

    def check(self, seen: Observation) -> Alarm | None:
        """Return the most severe sudden fault of a step; if there is none, add the step to the history."""
        alarm = next(self._sudden(seen), None)
        if alarm is None:
            self._remember(seen)
        return alarm

    def over_budget(self, seen: Observation) -> list[Alarm]:
        """Return the shares above their limits for `patience` consecutive steps, the largest per layer."""
        worst: dict[str, Alarm] = {}
        for key, alarm in self._budgets(seen):
            self._over[key] = self._over.get(key, 0) + 1 if alarm is not None else 0
            if alarm is None or self._over[key] < self._config.patience:
                continue
            known = worst.get(alarm.layer)
            if known is None or alarm.value / alarm.limit > known.value / known.limit:
                worst[alarm.layer] = alarm
        return list(worst.values())

    def forgive(self, layer: str) -> None:
        """Reset the count of steps above a limit for a layer, after a remedy."""
        for key in [key for key in self._over if key.startswith(f"{layer} ")]:
            del self._over[key]

    @property
    def loss_limit(self) -> float:
        """Limit of the loss; infinite without enough history."""
        if len(self._losses) < LEAST:
            return math.inf
        level = median(self._losses[-LEAST:])
        # Spread of differences, so that the trend of a quickly falling loss does not count.
        spread = NORMAL * median(abs(b - a) for a, b in pairwise(self._losses)) / math.sqrt(2)
        return level + max(self._config.loss_jump * spread, LEAST_RISE * abs(level))

    @property
    def gradient_limit(self) -> float:
        """Limit of the gradient norm; infinite without enough history."""
        return self._config.gradient_jump * median(self._norms) if len(self._norms) >= LEAST else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {
            "losses": [*self._losses],
            "norms": [*self._norms],
            "weights": {**self._weights},
            "over": {**self._over},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._losses, self._norms = [*state["losses"]], [*state["norms"]]
        self._weights, self._over = {**state["weights"]}, {**state["over"]}

    def _sudden(self, seen: Observation) -> Iterator[Alarm]:
        yield from self._nonfinite(seen)
        yield from self._jumps(seen)
        if seen.loss > (limit := self.loss_limit):
            yield Alarm(seen.step, "loss spike", "", "", seen.loss, limit)
        if seen.gradient_norm > (limit := self.gradient_limit):
            yield Alarm(seen.step, "gradient spike", "", "", seen.gradient_norm, limit)

    def _nonfinite(self, seen: Observation) -> Iterator[Alarm]:
        """Yield non-finite values: in the first layer that telemetry saw them in, else in the loss."""
        if seen.values is not None:
            for number in forward_first(self.rows):
                share = float(seen.values[number, _NONFINITE])
                if share > 0:
                    layer, role = self.rows[number][:2]
                    yield Alarm(seen.step, "nonfinite", layer, role, share, 0.0)
        for value in (seen.loss, seen.gradient_norm):
            if not math.isfinite(value):
                yield Alarm(seen.step, "nonfinite", "", "", value, math.inf)

    def _jumps(self, seen: Observation) -> Iterator[Alarm]:
        for layer, amax in self._amax_of_weights(seen):
            before = self._weights.get(layer, 0.0)
            limit = max(self._config.weight_jump * before, before + UPDATE * seen.lr)
            if before > 0 and amax > limit:
                yield Alarm(seen.step, "weight jump", layer, "weight", amax, limit)

    def _amax_of_weights(self, seen: Observation) -> Iterator[tuple[str, float]]:
        if seen.values is None:
            return
        for (layer, role, *_), values in zip(self.rows, seen.values, strict=True):
            if role == "weight" and values[_AMAX] > 0:
                yield layer, float(values[_AMAX])

    def _budgets(self, seen: Observation) -> Iterator[tuple[str, Alarm | None]]:
        """Yield each measured share by name, with an alarm if it exceeds its limit."""
        if seen.values is None:
            return
        config = self._config
        for (layer, role, *_), values in zip(self.rows, seen.values, strict=True):
            if role not in ("input", "weight", "grad_output"):
                continue
            flushed = config.flushed_gradient if role == "grad_output" else config.flushed
            for rule, column, limit in (("saturated", _SATURATED, config.saturated), ("flushed", _FLUSHED, flushed)):
                share = float(values[column])
                if not math.isnan(share):
                    is_over = share > limit
                    yield (
                        f"{layer} {role} {rule}",
                        Alarm(seen.step, rule, layer, role, share, limit) if is_over else None,
                    )

    def _remember(self, seen: Observation) -> None:
        self._losses = [*self._losses, seen.loss][-PAST:]
        self._norms = [*self._norms, seen.gradient_norm][-PAST:]
        self._weights.update(self._amax_of_weights(seen))


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
        if (old[_NONFINITE] > 0) != (new[_NONFINITE] > 0):
            return rows[number][0], rows[number][1]
        low, high = sorted((float(old[_AMAX]), float(new[_AMAX])))
        if low > 0 and high > 2 * low:
            return rows[number][0], rows[number][1]
    return None


def worst_layers(rows: Sequence[Row], values: NDArray[np.float32] | None) -> list[str]:
    """Return the layers harmed by FP8 in a step, the worst first: non-finite, then saturated and flushed."""
    if values is None:
        return []
    harm: dict[str, float] = {}
    for (layer, *_), row in zip(rows, values, strict=True):
        shares = [float(row[column]) for column in (_NONFINITE, _SATURATED, _FLUSHED)]
        known = [0.0 if math.isnan(share) else share for share in shares]
        harm[layer] = max(harm.get(layer, 0.0), 1e6 * (known[0] > 0) + 10 * known[1] + known[2])
    return sorted((layer for layer in harm if harm[layer] > 0), key=lambda layer: -harm[layer])
