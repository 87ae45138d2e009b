"""The rules of guardrails: from the measurements of a step to alarms.

`RULES` lists them and the properties that decide how an alarm is handled. `AlarmRules` finds steps that break one. The
same measurements raise the same alarms on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, variance
from typing import Any, Literal, NamedTuple

import numpy as np

from octavo._util.terminal import quantity
from octavo.lab.guard.alarms import Alarm, GuardEvent, Observation
from octavo.lab.guard.config import GuardConfig
from octavo.lab.guard.history import (
    BEFORE,
    LEAST,
    PAST,
    RECENT,
    SETTLED,
    SHORT,
    History,
    log_variances,
    weight_amax,
)
from octavo.lab.guard.parameters import ParameterStats
from octavo.lab.guard.telemetry_rows import FLUSHED, NONFINITE, SATURATED, forward_first, layer_of

LEAST_RISE = 0.05
"""Smallest rise of the loss that is a spike, as a share of the median, however quiet the run was."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
RARE = 1e-5
"""Share of steps whose loss may be a spike by chance."""
LEAST_DRIFT, LEAST_GAP, LEAST_SHIFT = 0.003, 0.2, 0.02
"""Smallest drift of the loss, as a share; of the gap, in percent; of the log variance of a layer's tensor."""
NOISE = 0.001
"""Least standard deviation of a log variance, for tensors whose variance never changes."""
FALLS, STEADY = 6, 0.35
"""Consecutive falls of the loss, each below this share of its usual change, that betray a batch being repeated."""
SECOND_DROP, SECOND_JUMP = 0.75, 100.0
"""Factors by which a second moment may fall per step, as Adam's decays by `beta2` at most, and rise between checks."""
STALL = 0.02
"""Share of its usual change below which a parameter is not being updated."""
RISE = 3.0
"""Factor by which a learning rate that has stopped rising may rise within `SETTLED` steps."""
LASTING = 4
"""Consecutive alarms of a sudden rule after which the new level is adopted."""
EPISODE, EVENTS = 16, 6
"""Steps without alarm that end an episode of a rule, and episodes reported per `quiet` steps."""
UPDATE = 100.0
"""Bound on the change of an element per step, in learning rates: AdamW's is (1 - b1) / sqrt(1 - b2)."""


class Rule(NamedTuple):
    """Properties of a rule that decide how its alarms are handled."""

    kind: Literal["sudden", "slow", "update", "reported", "budget"]
    """`sudden`: the step itself breaks it, and its batch may be the cause. `slow`: broken once a change exceeds the
    noise, some steps after the fault. `update`: parameters or moments changed as no update of the optimizer changes
    them, at a check every `parameters_every` steps. `reported`: a rollback cannot help. `budget`: a share of a tensor's
    elements is above its limit for `patience` steps."""
    compared: tuple[str, ...] = ()
    """Fields of `History` that hold the usual level, dropped when a new level is adopted; without any, none is."""
    delay: int = 0
    """Steps from a fault to its alarm, at most."""
    cause: str = ""
    """Cause that a reported rule names."""
    level: str = "warning"
    """Level of its event if nothing is done about the alarm."""


RULES = {
    "nonfinite": Rule("sudden", level="error"),
    "weight jump": Rule("sudden", ("weights",)),
    "loss spike": Rule("sudden", ("losses",)),
    "gradient spike": Rule("sudden", ("norms",)),
    "ranks differ": Rule("reported", cause="model", level="error"),
    "update": Rule("update", ("rates", "second", "top_lr")),
    "no update": Rule("update", ("rates", "second", "top_lr")),
    "moments": Rule("update", ("rates", "second", "top_lr")),
    "layer shift": Rule("slow", ("variances",), delay=SHORT),
    "loss drift": Rule("slow", ("losses",), delay=RECENT + SHORT),
    "repeat": Rule("reported", cause="data"),
    "gap": Rule("slow", ("gaps",), delay=SHORT),
    "learning rate": Rule("reported", cause="optimizer"),
    "saturated": Rule("budget"),
    "flushed": Rule("budget"),
    "shadow": Rule("budget"),
    "refused": Rule("budget"),
}
"""By name, the most severe first. `shadow`: the loss of a batch is lower in BF16. `refused`: a layer that should be
refined cannot change its recipe."""


class AlarmRules:
    """The rules with the history of a run.

    Args:
        config: limits.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._history = History()

    def check(self, seen: Observation) -> Alarm | None:
        """Return the most severe fault of a step; if there is none, add the step to the history.

        A level that lasts is adopted: at once by slow rules and those of updates, whose alarms are rare; after
        `LASTING` consecutive alarms by sudden ones.
        """
        history, alarm = self._history, next(self._faults(seen), None)
        history.lrs = [*history.lrs, seen.lr][-SETTLED:]
        if alarm is None or RULES[alarm.rule].kind == "reported":
            history.lasting.clear()
            history.remember(seen)
        elif RULES[alarm.rule].compared:
            history.lasting[alarm.rule] = history.lasting.get(alarm.rule, 0) + 1
            if RULES[alarm.rule].kind != "sudden" or history.lasting[alarm.rule] >= LASTING:
                self.adopt(alarm)
                history.remember(seen)
        return alarm

    def suspect(self, seen: Observation) -> Alarm | None:
        """Return the layer whose parameters or moments no update explains; None if it is not one layer."""
        infinite = [alarm for alarm in self._nonfinite(seen._replace(values=None)) if alarm.layer]
        if infinite:
            return infinite[0] if len({alarm.layer for alarm in infinite}) == 1 else None
        return next((alarm for alarm in self._updates(seen) if alarm.layer), None)

    def adopt(self, alarm: Alarm) -> None:
        """Forget the usual level that an alarm was raised against: the new one is normal from now on."""
        self._history.lasting.pop(alarm.rule, None)
        self._history.forget(RULES[alarm.rule].compared)

    def report(self, alarm: Alarm) -> GuardEvent | None:
        """Return the event of an alarm that is only reported; None if it is no news."""
        if not self.is_news(alarm):
            return None
        rule = RULES[alarm.rule]
        lasted = f", for {quantity(self._config.patience, 'step')}" if rule.kind == "budget" else ""
        return alarm.event(f"{alarm}{lasted}", level=rule.level, cause=rule.cause)

    def is_news(self, alarm: Alarm) -> bool:
        """Return True, and record it, if an alarm begins a new episode and its rule has not reported too many.

        A budget that stays exceeded is reported once per `quiet` steps.
        """
        key, step = f"{alarm.rule} {alarm.layer} {alarm.role}", alarm.step
        is_budget = RULES[alarm.rule].kind == "budget"
        group, most, pause = (key, 1, 0) if is_budget else (alarm.rule, EVENTS, EPISODE)
        last = self._history.last_alarm.get(key, step - pause)
        recent = [at for at in self._history.reported.get(group, ()) if step - at < self._config.quiet]
        is_news = not 0 <= step - last < pause and len(recent) < most
        self._history.last_alarm[key] = step
        self._history.reported[group] = [*recent, step] if is_news else recent
        return is_news

    def over_budget(self, seen: Observation) -> list[Alarm]:
        """Return the shares above their limits for `patience` consecutive steps, the largest per layer."""
        worst: dict[str, Alarm] = {}
        for key, alarm in self._budgets(seen):
            self._history.over[key] = self._history.over.get(key, 0) + 1 if alarm is not None else 0
            if alarm is not None and self._history.over[key] >= self._config.patience:
                known = worst.get(alarm.layer, alarm)
                worst[alarm.layer] = max(known, alarm, key=lambda each: each.value / each.limit)
        return list(worst.values())

    def shares_over(self, seen: Observation, layer: str) -> list[Alarm]:
        """Return the shares of a layer's elements that are above their limits in a step, also for a single step."""
        return [alarm for _, alarm in self._budgets(seen) if alarm is not None and alarm.layer == layer]

    def forgive(self, layer: str) -> None:
        """Reset the count of steps above a limit for a layer, after a remedy."""
        self._history.over = {
            key: count for key, count in self._history.over.items() if not key.startswith(f"{layer} ")
        }

    @property
    def loss_limit(self) -> float:
        """Limit of the loss; infinite without enough history.

        The spread of differences, so that the trend of a quickly falling loss does not count. Where the tail of the
        loss is heavy, a quantile of it: a power law fitted to the largest excesses (Hill's estimator).
        """
        if len(self._history.losses) < LEAST:
            return math.inf
        past = self._history.losses[-PAST:]
        level = median(past[-LEAST:])
        spread = NORMAL * median(abs(b - a) for a, b in pairwise(past)) / math.sqrt(2)
        return level + max(self._config.loss_jump * spread, LEAST_RISE * abs(level), _tail(self._history.excess))

    @property
    def gradient_limit(self) -> float:
        """Limit of the gradient norm; infinite without enough history."""
        return (
            self._config.gradient_jump * median(self._history.norms) if len(self._history.norms) >= LEAST else math.inf
        )

    @property
    def lr_limit(self) -> float:
        """Limit of the learning rate; infinite in a warm-up, in which every step has a higher one."""
        return RISE * min(self._history.settled_lrs, default=math.inf) or math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._history.load_state_dict(state)

    def _faults(self, seen: Observation) -> Iterator[Alarm]:
        yield from self._nonfinite(seen)
        for layer, amax in weight_amax(seen):
            before = self._history.weights.get(layer, 0.0)
            limit = max(self._config.weight_jump * before, before + UPDATE * seen.lr)
            if before > 0 and amax > limit:
                yield Alarm(seen.step, "weight jump", layer, "weight", amax, limit)
        if seen.loss > (limit := self.loss_limit):
            yield Alarm(seen.step, "loss spike", "", "", seen.loss, limit)
        if seen.gradient_norm > (limit := self.gradient_limit):
            yield Alarm(seen.step, "gradient spike", "", "", seen.gradient_norm, limit)
        yield from self._updates(seen)
        yield from self._shifts(seen)
        yield from self._loss_drift(seen)
        yield from self._repeat(seen)
        yield from self._gap(seen)
        if seen.lr > (limit := self.lr_limit):
            yield Alarm(seen.step, "learning rate", "", "", seen.lr, limit)

    def _nonfinite(self, seen: Observation) -> Iterator[Alarm]:
        """Yield non-finite values: in the first layer that telemetry saw them in, else in the loss."""
        if seen.values is not None:
            shares = seen.values[:, NONFINITE]
            # Clipping by a norm that is not finite spreads it to all gradients of weights.
            bad = [number for number in forward_first(seen.rows) if shares[number] > 0]
            is_spread = sum(seen.rows[number][1] == "grad_weight" for number in bad) > 1
            for number in bad:
                layer, role = seen.rows[number][:2]
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

    def _budgets(self, seen: Observation) -> Iterator[tuple[str, Alarm | None]]:
        """Yield each measured share by name, with an alarm if it exceeds its limit."""
        if seen.values is None:
            return
        config = self._config
        for (layer, role, *_), values in zip(seen.rows, seen.values, strict=True):
            if role not in ("input", "weight", "grad_output"):
                continue
            flushed = config.flushed_gradient if role == "grad_output" else config.flushed
            for rule, column, limit in (("saturated", SATURATED, config.saturated), ("flushed", FLUSHED, flushed)):
                share = float(values[column])
                if not math.isnan(share):
                    alarm = Alarm(seen.step, rule, layer, role, share, limit)
                    yield f"{layer} {role} {rule}", alarm if share > limit else None

    def _updates(self, seen: Observation) -> Iterator[Alarm]:
        """Yield parameters whose change, and moments that, no update of the optimizer explains."""
        if seen.parameters is not None:
            yield from self._disagreements(seen.step, seen.parameters)
            yield from self._update_rates(seen)
            yield from self._second_moments(seen.step, seen.parameters)

    def _disagreements(self, step: int, found: ParameterStats) -> Iterator[Alarm]:
        """Yield parameters that differ between ranks."""
        for name, difference, norm in zip(found.names, found.disagreement, found.norm, strict=True):
            if difference > 1e-6 * norm:
                yield Alarm(step, "ranks differ", layer_of(name), "weight", float(difference), 1e-6 * float(norm))

    def _update_rates(self, seen: Observation) -> Iterator[Alarm]:
        """Yield the parameter whose update is farthest above its usual size, and that which is farthest below."""
        jumps, stalls = {}, {}
        for name, rate in self._history.rates_of(seen):
            usual = self._history.rates.get(name, ())
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

    def _second_moments(self, step: int, found: ParameterStats) -> Iterator[Alarm]:
        """Yield second moments that fall faster than they decay, or jump after the warm-up."""
        drop = SECOND_DROP ** max(found.steps, 5)
        for name, second in zip(found.names, found.second, strict=True):
            before = self._history.second.get(name, math.nan)
            if second < drop * before:
                yield Alarm(step, "moments", layer_of(name), "moments", second, drop * before)
            elif second > SECOND_JUMP * before > 0 and self._history.settled_lrs:  # gradients may grow a lot before
                yield Alarm(step, "moments", layer_of(name), "moments", second, SECOND_JUMP * before)

    def _shifts(self, seen: Observation) -> Iterator[Alarm]:
        """Yield the first tensor, in the order of a step, whose variance has shifted; then all gradients of weights."""
        if seen.values is None:
            return
        known = log_variances(seen.values, seen.rows)
        history = [row for row in self._history.variances if row.shape == known.shape]  # layers may have left FP8
        if len(history) < BEFORE + SHORT - 1:
            return
        table = np.stack([*history, known])
        past = table[-SHORT - BEFORE : -SHORT]
        shifts = table[-SHORT:] - past.mean(0)
        outlier = np.take_along_axis(shifts, np.abs(shifts).argmax(0)[None], 0)[0]  # tails of small batches are heavy
        shift = np.abs(shifts.sum(0) - outlier) / (SHORT - 1)
        error = np.maximum(past.std(0, ddof=1), NOISE) * math.sqrt(1 / (SHORT - 1) + 1 / BEFORE)
        limit = np.maximum(self._config.layer_shift * error, LEAST_SHIFT)
        for number in [*forward_first(seen.rows), *range(len(seen.rows), len(shift))]:
            if shift[number] > limit[number]:
                layer, role = seen.rows[number][:2] if number < len(seen.rows) else ("", "grad_weight")
                yield Alarm(seen.step, "layer shift", layer, role, float(shift[number]), float(limit[number]))

    def _loss_drift(self, seen: Observation) -> Iterator[Alarm]:
        """Yield a rise of the loss over the last steps, or over half as many."""
        losses = [*self._history.losses, seen.loss]
        for recent in (RECENT, RECENT // 2) if len(losses) >= RECENT + BEFORE else ():
            now, past = losses[-recent:], losses[-recent - BEFORE : -recent]
            # The variance within both groups, so that one outlier never looks like a drift.
            within = (variance(now) * (recent - 1) + variance(past) * (BEFORE - 1)) / (recent + BEFORE - 2)
            level = fmean(past)
            rise = self._config.drift * math.sqrt(within * (1 / recent + 1 / BEFORE))
            limit = level + max(rise, LEAST_DRIFT * abs(level))
            if (mean := fmean(now)) > limit:
                yield Alarm(seen.step, "loss drift", "", "", mean, limit)

    def _repeat(self, seen: Observation) -> Iterator[Alarm]:
        """Yield a loss that falls steadily by little, as it does while a batch is repeated."""
        falls = [before - after for before, after in pairwise([*self._history.losses, seen.loss])]
        if len(falls) >= BEFORE + FALLS and min(falls[-FALLS:]) > 0:
            usual = median(map(abs, falls[-FALLS - BEFORE : -FALLS]))
            if (largest := max(falls[-FALLS:])) < STEADY * usual:
                yield Alarm(seen.step, "repeat", "", "", largest, STEADY * usual)

    def _gap(self, seen: Observation) -> Iterator[Alarm]:
        """Yield a rise of the loss above that of the BF16 baseline."""
        gaps = [] if seen.gap is None else [*self._history.gaps, seen.gap]
        if len(gaps) >= SHORT + BEFORE:
            past = gaps[-SHORT - BEFORE : -SHORT]
            error, level = math.sqrt(variance(past) * (1 / SHORT + 1 / BEFORE)), fmean(past)
            limit = level + max(self._config.gap_drift * error, LEAST_GAP)
            if (mean := fmean(gaps[-SHORT:])) > limit:
                yield Alarm(seen.step, "gap", "", "", mean, limit)


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
