"""Rules: from the measurements of a step to alarms. Deterministic: the same measurements raise the same alarms.

Sudden faults raise an `Alarm` at once (`AlarmRules.check`): a non-finite value, a spike of the loss or gradient norm, a
parameter or moment that no update can have produced. Slow ones raise it once they exceed the noise: a drift of the
loss, of its gap to the BF16 baseline, or of the variance of a layer's tensors. Shares of flushed or saturated elements
have a budget (`AlarmRules.over_budget`): some consecutive steps above their limit.

Only steps that raised no alarm become the history that later steps are compared with. A level that lasts is no fault:
it is adopted (`AlarmRules.adopt`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, variance
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.guard.config import GuardConfig
from octavo.guard.parameters import ParameterStats
from octavo.kernels.sample import STATS

PAST = 32
"""Steps of loss and gradient-norm history."""
LEAST = 8
"""Steps of history needed before anything is called a spike."""
LEAST_RISE = 0.05
"""Smallest rise of the loss that is a spike, as a share of the median, however quiet the run was."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
TAIL, RARE = 256, 1e-5
"""Excesses of the loss over its level that the tail is estimated from, and how seldom one may be a spike by chance."""
RECENT, BEFORE = 16, 46
"""Steps that the drift of the loss compares; half as many recent ones, too, for faster drifts."""
SHORT = 4
"""Steps whose mean is compared by the other slow rules."""
LEAST_DRIFT, LEAST_GAP, LEAST_SHIFT = 0.003, 0.2, 0.02
"""Smallest drift of the loss, as a share; of the gap, in percent; of the log variance of a layer's tensor."""
NOISE = 0.001
"""Least standard deviation of a log variance, for tensors whose variance never changes."""
FALLS, STEADY = 6, 0.35
"""Consecutive falls of the loss, each below this share of its usual change, that betray a batch being repeated."""
CHECKS = 16
"""Checks of parameters that are remembered; 3 are needed."""
SECOND_DROP, SECOND_JUMP = 0.75, 100.0
"""Factors by which a second moment may fall per step, as Adam's decays by `beta2` at most, and rise between checks."""
STALL = 0.02
"""Share of its usual change below which a parameter is not being updated."""
RISE, SETTLED = 3.0, 16
"""Factor by which a learning rate that has stopped rising may rise within so many steps."""
LASTING = 4
"""Consecutive alarms of a rule after which the new level is adopted."""
EPISODE, EVENTS = 16, 6
"""Steps without alarm that end an episode of a rule, and episodes reported per `quiet` steps."""
UPDATE = 100.0
"""Bound on the change of an element per step, in learning rates: AdamW's is (1 - b1) / sqrt(1 - b2)."""
_AMAX, _NONFINITE, _SATURATED, _FLUSHED = (STATS.index(s) for s in ("amax", "nonfinite", "saturated", "flushed"))
_VARIANCE = STATS.index("variance")
SLOW = ("loss drift", "gap", "layer shift")
"""Rules that see a fault some steps after it began."""
REPORTED = {"ranks differ": "model", "repeat": "data", "learning rate": "optimizer"}
"""Rules that a rollback cannot help, and the cause that they name."""
OF_UPDATES = ("update", "no update", "moments")
"""Rules on parameters and moments, checked every `parameters_every` steps."""
LASTING_RULES = ("loss spike", "gradient spike", "weight jump", *SLOW, *OF_UPDATES)
"""Rules whose new level may be adopted."""

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
    parameters: ParameterStats | None = None
    """Invariants of parameters; None if the step was not checked."""
    twin_loss: float = math.nan
    """Loss of the BF16 baseline on the same batch; NaN without one."""


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
    """One of `octavo.guard.diagnosis.Cause`, if known."""
    back_to: int | None = None
    """Number of steps that still count, if the run was rolled back."""


class Alarm(NamedTuple):
    """A violation of a rule."""

    step: int
    """The step that violated it."""
    rule: str
    """`nonfinite`, `saturated`, `flushed`, one of `REPORTED` or of `LASTING_RULES`."""
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
        """Return the event that tells of it; by default a warning, of the same layer and role."""
        event = GuardEvent(self.step, "warning", self.rule, text, "", self.layer, self.role, self.value, self.limit)
        return event._replace(**details)


class AlarmRules:
    """The rules and their history."""

    def __init__(self, config: GuardConfig, rows: Sequence[Row] = ()) -> None:
        self._config = config
        self.rows = rows
        self._losses: list[float] = []
        self._excess: list[float] = []
        self._norms: list[float] = []
        self._gaps: list[float] = []
        self._variances: list[NDArray[np.float64]] = []
        self._weights: dict[str, float] = {}
        self._rates: dict[str, list[float]] = {}
        self._second: dict[str, float] = {}
        self._top_lr = 0.0
        self._lrs: list[float] = []
        """Learning rates of the last steps; those of before a resume do not count."""
        self._over: dict[str, int] = {}
        self._lasting: dict[str, int] = {}
        self._last_alarm: dict[str, int] = {}
        self._reported: dict[str, list[int]] = {}

    def check(self, seen: Observation) -> Alarm | None:
        """Return the most severe fault of a step; if there is none, add the step to the history.

        The level of a rule that raised `LASTING` consecutive alarms is adopted.
        """
        alarm = next(self._faults(seen), None)
        self._lrs = [*self._lrs, seen.lr][-SETTLED:]
        if alarm is None or alarm.rule in REPORTED:
            self._lasting.clear()
            self._remember(seen)
        elif alarm.rule in LASTING_RULES:
            self._lasting[alarm.rule] = self._lasting.get(alarm.rule, 0) + 1
            if alarm.rule in (*SLOW, *OF_UPDATES) or self._lasting[alarm.rule] >= LASTING:
                self.adopt(alarm, seen)
        return alarm

    def suspect(self, seen: Observation) -> Alarm | None:
        """Return the layer whose parameters or moments no update explains; None if it is not one layer."""
        infinite = [alarm for alarm in self._nonfinite(seen._replace(values=None)) if alarm.layer]
        if infinite:
            return infinite[0] if len({alarm.layer for alarm in infinite}) == 1 else None
        return next((alarm for alarm in self._updates(seen) if alarm.layer), None)

    def adopt(self, alarm: Alarm, seen: Observation | None = None) -> None:
        """Forget the history that an alarm was raised against: its level is the new normal."""
        self._lasting.pop(alarm.rule, None)
        if alarm.rule in ("loss spike", "loss drift"):
            self._losses.clear()
        elif alarm.rule == "gradient spike":
            self._norms.clear()
        elif alarm.rule == "gap":
            self._gaps.clear()
        elif alarm.rule == "layer shift":
            self._variances.clear()
        elif alarm.rule in OF_UPDATES:
            self._rates.clear()
            self._second.clear()
            self._top_lr = 0.0
        else:
            self._weights.clear()
        if seen is not None:
            self._remember(seen)

    def is_news(self, alarm: Alarm) -> bool:
        """Return True, and record it, if an alarm begins a new episode and its rule has not reported too many.

        A budget that stays exceeded is reported once per `quiet` steps.
        """
        key, step = f"{alarm.rule} {alarm.layer} {alarm.role}", alarm.step
        is_budget = alarm.rule not in ("nonfinite", *REPORTED, *LASTING_RULES)
        group, most, pause = (key, 1, 0) if is_budget else (alarm.rule, EVENTS, EPISODE)
        last = self._last_alarm.get(key, step - pause)
        recent = [at for at in self._reported.get(group, ()) if step - at < self._config.quiet]
        is_news = not 0 <= step - last < pause and len(recent) < most
        self._last_alarm[key] = step
        self._reported[group] = [*recent, step] if is_news else recent
        return is_news

    def over_budget(self, seen: Observation) -> list[Alarm]:
        """Return the shares above their limits for `patience` consecutive steps, the largest per layer."""
        worst: dict[str, Alarm] = {}
        for key, alarm in self._budgets(seen):
            self._over[key] = self._over.get(key, 0) + 1 if alarm is not None else 0
            if alarm is not None and self._over[key] >= self._config.patience:
                known = worst.get(alarm.layer, alarm)
                worst[alarm.layer] = max(known, alarm, key=lambda each: each.value / each.limit)
        return list(worst.values())

    def shares_over(self, seen: Observation, layer: str) -> list[Alarm]:
        """Return the shares of a layer's elements that are above their limits in a step, for however short."""
        return [alarm for _, alarm in self._budgets(seen) if alarm is not None and alarm.layer == layer]

    def forgive(self, layer: str) -> None:
        """Reset the count of steps above a limit for a layer, after a remedy."""
        self._over = {key: count for key, count in self._over.items() if not key.startswith(f"{layer} ")}

    @property
    def loss_limit(self) -> float:
        """Limit of the loss; infinite without enough history.

        The spread of differences, so that the trend of a quickly falling loss does not count. Where the tail of the
        loss is heavy, a quantile of it: a power law fitted to the largest excesses (Hill's estimator).
        """
        if len(self._losses) < LEAST:
            return math.inf
        past = self._losses[-PAST:]
        level = median(past[-LEAST:])
        spread = NORMAL * median(abs(b - a) for a, b in pairwise(past)) / math.sqrt(2)
        return level + max(self._config.loss_jump * spread, LEAST_RISE * abs(level), _tail(self._excess))

    @property
    def gradient_limit(self) -> float:
        """Limit of the gradient norm; infinite without enough history."""
        return self._config.gradient_jump * median(self._norms) if len(self._norms) >= LEAST else math.inf

    @property
    def lr_limit(self) -> float:
        """Limit of the learning rate; infinite in a warm-up, in which every step has a higher one."""
        return RISE * min(self._settled_lrs, default=math.inf) or math.inf

    @property
    def _settled_lrs(self) -> list[float]:
        """The last learning rates, without those of a warm-up."""
        end = next((end for end, (a, b) in enumerate(pairwise(self._lrs), 1) if b <= a), len(self._lrs))
        return self._lrs[end:]

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        plain = {name: copy.deepcopy(getattr(self, f"_{name}")) for name in _HISTORY}
        variances = [[value if math.isfinite(value) else None for value in row.tolist()] for row in self._variances]
        return {**plain, "variances": variances}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; what a checkpoint of an older version lacks starts empty.

        Learning rates start empty, too: those of steps that were undone would look like the end of a warm-up.
        """
        self._lrs = []
        for name in _HISTORY:
            if name in state:
                setattr(self, f"_{name}", copy.deepcopy(state[name]))
        self._variances = [np.asarray(row, dtype=np.float64) for row in state.get("variances", ())]

    def _faults(self, seen: Observation) -> Iterator[Alarm]:
        yield from self._nonfinite(seen)
        for layer, amax in self._amax_of_weights(seen):
            before = self._weights.get(layer, 0.0)
            limit = max(self._config.weight_jump * before, before + UPDATE * seen.lr)
            if before > 0 and amax > limit:
                yield Alarm(seen.step, "weight jump", layer, "weight", amax, limit)
        if seen.loss > (limit := self.loss_limit):
            yield Alarm(seen.step, "loss spike", "", "", seen.loss, limit)
        if seen.gradient_norm > (limit := self.gradient_limit):
            yield Alarm(seen.step, "gradient spike", "", "", seen.gradient_norm, limit)
        yield from self._updates(seen)
        yield from self._shifts(seen)
        yield from self._drifts(seen)
        if seen.lr > (limit := self.lr_limit):
            yield Alarm(seen.step, "learning rate", "", "", seen.lr, limit)

    def _nonfinite(self, seen: Observation) -> Iterator[Alarm]:
        """Yield non-finite values: in the first layer that telemetry saw them in, else in the loss."""
        if seen.values is not None:
            shares = seen.values[:, _NONFINITE]
            # Clipping by a norm that is not finite spreads it to all gradients of weights.
            bad = [number for number in forward_first(self.rows) if shares[number] > 0]
            is_spread = sum(self.rows[number][1] == "grad_weight" for number in bad) > 1
            for number in bad:
                layer, role = self.rows[number][:2]
                layer = "" if role == "grad_weight" and is_spread else layer
                yield Alarm(seen.step, "nonfinite", layer, role, float(shares[number]), 0.0)
        if seen.parameters is not None:
            for role in ("norm", "first", "second"):
                for name, norm in zip(seen.parameters.names, getattr(seen.parameters, role), strict=True):
                    if math.isinf(norm) or (role == "norm" and math.isnan(norm)):
                        yield Alarm(seen.step, "nonfinite", layer_of(name), "weight", norm, math.inf)
        for value in (seen.loss, seen.gradient_norm):
            if not math.isfinite(value):
                yield Alarm(seen.step, "nonfinite", "", "", value, math.inf)

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
                    alarm = Alarm(seen.step, rule, layer, role, share, limit)
                    yield f"{layer} {role} {rule}", alarm if share > limit else None

    def _updates(self, seen: Observation) -> Iterator[Alarm]:
        """Yield parameters whose change, and moments that, no update of the optimizer explains."""
        found = seen.parameters
        if found is None:
            return
        for name, difference, norm in zip(found.names, found.disagreement, found.norm, strict=True):
            if difference > 1e-6 * norm:
                yield Alarm(seen.step, "ranks differ", layer_of(name), "weight", float(difference), 1e-6 * float(norm))
        jumps, stalls = {}, {}
        for name, rate in self._rates_of(seen):
            usual = self._rates.get(name, ())
            if len(usual) < 3 or median(usual) <= 0:
                continue
            jumps[name] = rate / (self._config.update_jump * median(usual))
            stalls[name] = STALL * median(usual) / max(rate, 1e-300)
        for rule, ratios in (("update", jumps), ("no update", stalls)):
            over = {name: ratio for name, ratio in ratios.items() if ratio > 1}
            if over:
                worst = max(over, key=lambda name: over[name])
                layer = layer_of(worst) if len(over) < max(0.5 * len(ratios), 2) else ""
                if rule == "no update" and layer:
                    continue  # BF16 rounds small updates of single parameters away
                yield Alarm(seen.step, rule, layer, "weight" if layer else "", over[worst], 1.0)
        drop = SECOND_DROP ** max(found.steps, 5)
        for name, second in zip(found.names, found.second, strict=True):
            before = self._second.get(name, math.nan)
            if second < drop * before:
                yield Alarm(seen.step, "moments", layer_of(name), "moments", second, drop * before)
            elif second > SECOND_JUMP * before > 0 and self._settled_lrs:  # gradients may grow a lot in a warm-up
                yield Alarm(seen.step, "moments", layer_of(name), "moments", second, SECOND_JUMP * before)

    def _rates_of(self, seen: Observation) -> Iterator[tuple[str, float]]:
        """Yield the change of each parameter per step and learning rate; a rate never used before counts as the top."""
        found = seen.parameters
        if found is None or not found.steps or seen.lr <= 0:
            return
        lr = min(seen.lr, self._top_lr) if self._top_lr else seen.lr
        for name, change in zip(found.names, found.change, strict=True):
            if math.isfinite(change):
                yield name, float(change) / (found.steps * lr)

    def _shifts(self, seen: Observation) -> Iterator[Alarm]:
        """Yield the first tensor, in the order of a step, whose variance has shifted; then all gradients of weights."""
        if seen.values is None:
            return
        known = self._log_variances(seen.values)
        history = [row for row in self._variances if row.shape == known.shape]  # layers may have left FP8
        if len(history) < BEFORE + SHORT - 1:
            return
        table = np.stack([*history, known])
        past = table[-SHORT - BEFORE : -SHORT]
        shifts = table[-SHORT:] - past.mean(0)
        outlier = np.take_along_axis(shifts, np.abs(shifts).argmax(0)[None], 0)[0]  # tails of small batches are heavy
        shift = np.abs(shifts.sum(0) - outlier) / (SHORT - 1)
        error = np.maximum(past.std(0, ddof=1), NOISE) * math.sqrt(1 / (SHORT - 1) + 1 / BEFORE)
        limit = np.maximum(self._config.layer_shift * error, LEAST_SHIFT)
        for number in [*forward_first(self.rows), *range(len(self.rows), len(shift))]:
            if shift[number] > limit[number]:
                layer, role = self.rows[number][:2] if number < len(self.rows) else ("", "grad_weight")
                yield Alarm(seen.step, "layer shift", layer, role, float(shift[number]), float(limit[number]))

    def _log_variances(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the log variance of each tensor, then the median of the gradients of weights.

        Clipping scales these by one factor, in which one that is wrong would hide: they are relative to the median.
        """
        logs: NDArray[np.float64] = np.log(np.clip(values[:, _VARIANCE].astype(np.float64), 1e-300, 1e300))
        gradients = [number for number, row in enumerate(self.rows[: len(logs)]) if row[1] == "grad_weight"]
        if not gradients:
            return logs
        middle = np.median(logs[gradients])
        logs[gradients] -= middle
        return np.append(logs, middle)

    def _drifts(self, seen: Observation) -> Iterator[Alarm]:
        losses = [*self._losses, seen.loss]
        for recent in (RECENT, RECENT // 2) if len(losses) >= RECENT + BEFORE else ():
            now, past = losses[-recent:], losses[-recent - BEFORE : -recent]
            # The variance within both groups, so that one outlier never looks like a drift.
            within = (variance(now) * (recent - 1) + variance(past) * (BEFORE - 1)) / (recent + BEFORE - 2)
            level = fmean(past)
            rise = self._config.drift * math.sqrt(within * (1 / recent + 1 / BEFORE))
            limit = level + max(rise, LEAST_DRIFT * abs(level))
            if (mean := fmean(now)) > limit:
                yield Alarm(seen.step, "loss drift", "", "", mean, limit)
        falls = [before - after for before, after in pairwise(losses)]
        if len(falls) >= BEFORE + FALLS and min(falls[-FALLS:]) > 0:
            usual = median(map(abs, falls[-FALLS - BEFORE : -FALLS]))
            if (largest := max(falls[-FALLS:])) < STEADY * usual:
                yield Alarm(seen.step, "repeat", "", "", largest, STEADY * usual)
        gaps = [*self._gaps, gap] if (gap := _gap(seen)) is not None else []
        if len(gaps) >= SHORT + BEFORE:
            past = gaps[-SHORT - BEFORE : -SHORT]
            error, level = math.sqrt(variance(past) * (1 / SHORT + 1 / BEFORE)), fmean(past)
            limit = level + self._config.gap_drift * error
            if (mean := fmean(gaps[-SHORT:])) > max(limit, level + LEAST_GAP):
                yield Alarm(seen.step, "gap", "", "", mean, max(limit, level + LEAST_GAP))

    def _remember(self, seen: Observation) -> None:
        if not (math.isfinite(seen.loss) and math.isfinite(seen.gradient_norm)):
            return
        if len(self._losses) >= LEAST:
            excess = max(seen.loss - median(self._losses[-LEAST:]), 0.0)
            self._excess = [*self._excess, excess][-TAIL:]
        self._losses = [*self._losses, seen.loss][-RECENT - BEFORE :]
        self._norms = [*self._norms, seen.gradient_norm][-PAST:]
        self._weights.update(self._amax_of_weights(seen))
        if (gap := _gap(seen)) is not None:
            self._gaps = [*self._gaps, gap][-SHORT - BEFORE :]
        if seen.values is not None:
            known = self._log_variances(seen.values)
            self._variances = [*self._variances, known][-SHORT - BEFORE :]
        if seen.parameters is not None:
            for name, rate in self._rates_of(seen):
                self._rates[name] = [*self._rates.get(name, ()), rate][-CHECKS:]
            second = zip(seen.parameters.names, map(float, seen.parameters.second), strict=True)
            self._second = {name: value for name, value in second if math.isfinite(value)}
            self._top_lr = max(self._top_lr, seen.lr)


_HISTORY = (
    *("losses", "excess", "norms", "gaps", "weights", "rates", "second", "top_lr", "over", "lasting", "last_alarm"),
    "reported",
)


def layer_of(parameter: str) -> str:
    """Return the layer that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def _gap(seen: Observation) -> float | None:
    """Return the loss above the twin's in percent; None without a finite twin."""
    is_known = math.isfinite(seen.twin_loss) and math.isfinite(seen.loss) and seen.twin_loss
    return 100 * (seen.loss - seen.twin_loss) / abs(seen.twin_loss) if is_known else None


def _tail(excess: Sequence[float]) -> float:
    """Return the excess that is exceeded by chance in a share `RARE` of steps; three times the largest of a few."""
    largest = sorted(excess, reverse=True)
    if len(excess) < BEFORE:
        return 3 * largest[0] if largest else 0.0
    count = max(len(excess) // 16, 4)
    if largest[count] <= 0:
        return 0.0
    inverse = fmean(math.log(value / largest[count]) for value in largest[:count])
    return float(largest[count] * (count / (len(excess) * RARE)) ** inverse)


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
        low, high = sorted((float(old[_AMAX]), float(new[_AMAX])))
        if (old[_NONFINITE] > 0) != (new[_NONFINITE] > 0) or (low > 0 and high > 2 * low):
            layer, role = rows[number][:2]
            return _first_gradient(rows, before, after) if role == "grad_weight" else (layer, role)
    return None


def _first_gradient(
    rows: Sequence[Row], before: NDArray[np.float32], after: NDArray[np.float32]
) -> tuple[str, str] | None:
    """Return the weight whose gradient differs most. Clipping has scaled those of all weights by one factor."""
    numbers = [number for number, row in enumerate(rows) if row[1] == "grad_weight"]
    infinite = [number for number in numbers if before[number, _NONFINITE] > 0]
    if infinite:
        return (rows[infinite[0]][0], "grad_weight") if len(infinite) == 1 else None
    most = max(numbers, key=lambda number: before[number, _AMAX] / max(after[number, _AMAX], 1e-30))
    return rows[most][0], "grad_weight"


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
