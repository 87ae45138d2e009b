"""The verdict on a run, in words: its main measurements against the limits defined here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo._util.terminal import and_more, quantity
from octavo.errors import StoreError
from octavo.lab.data.quality import judge
from octavo.lab.guard import GuardConfig
from octavo.lab.monitor.gap import GAP_LIMIT, HARMFUL_GAP, fluctuation, judge_gap
from octavo.lab.monitor.store import RunReader, Series

LEVELS = ("healthy", "watch", "unhealthy", "unknown")
_GUARD = GuardConfig()
LIMITS = {
    "nonfinite": 0.0,
    "saturated": _GUARD.saturated,
    "flushed": _GUARD.flushed,
    "flushed grad_output": _GUARD.flushed_gradient,
}
"""Limits of the shares of a tensor's elements, mean over the newest snapshots: those of guardrails. By statistic, or by
statistic and role."""
GAP_STEPS = 50
"""Number of newest recorded steps whose mean gap is judged."""
RISE_LIMIT = 5.0
"""Limit of the loss above its minimum, in percent."""
SNAPSHOTS = 16
"""Number of newest snapshots whose mean is judged."""
SHARE = 0.1
"""Share of a run that counts as recent."""
LOSSES = ("loss_fp8", "loss", "loss_bf16")
"""Names of the main loss, the first one that a run has: of the FP8 model, or of the only one."""
_PREDICATES = {"nonfinite": "is not finite", "saturated": "saturates", "flushed": "is flushed to zero"}


class RunFinding(NamedTuple):
    """One finding about a run."""

    level: str
    """`healthy` (for information), `watch` or `unhealthy`."""
    text: str
    layer: str = ""
    """Layer concerned; empty for the whole run."""
    view: str = ""
    """View of the page with details."""


class RunVerdict(NamedTuple):
    """Verdict on a run."""

    level: str
    """One of `LEVELS`."""
    text: str
    """One or two sentences."""
    findings: list[RunFinding]
    """Findings, worst first."""


def verdict(run: RunReader) -> RunVerdict:
    """Return the present verdict. Reads only the newest rows, however long the run."""
    judges = (of_state, of_tensors, of_loss, of_precision, of_tasks, of_data, of_events)
    found = worst_first(finding for judge in judges for finding in judge(run))
    if not run.last_step:
        return RunVerdict("unknown", "No measurements yet: no step was completed.", found)
    level = found[0].level if found else "healthy"
    opening = {"healthy": "Healthy", "watch": "Check", "unhealthy": "Unhealthy"}[level]
    reasons = [finding.text for finding in found if finding.level == level != "healthy"]
    reason = f"{reasons[0]}{and_more(reasons)}." if reasons else ""
    facts = _facts(run)
    facts = f"{facts[0].upper()}{facts[1:]}" if reason else facts
    told = judge_gap(gap_summary(run)).text
    return RunVerdict(level, " ".join(part for part in (f"{opening}:", reason, f"{facts}.", told) if part), found)


def worst_first(findings: Iterable[RunFinding]) -> list[RunFinding]:
    """Sort findings, worst first."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level), reverse=True)


def loss_key(keys: Container[str]) -> str | None:
    """Return the name of the main loss, one of `LOSSES`; None without one."""
    return next((key for key in LOSSES if key in keys), None)


def newest(series: Series | None) -> float:
    """Return the last value of a series; NaN if empty."""
    return float(series.high[-1]) if series is not None and len(series) else math.nan


def _recent(run: RunReader) -> dict[str, Series]:
    """Return losses and gap of the last tenth of the run, but of at least 200 and at most 2,000 steps."""
    last = run.last_step
    first = last - min(max(int(SHARE * last), 200), 2000) + 1
    return {key: series for key, series in run.scalars([*LOSSES, "gap_percent"], first=first).items() if len(series)}


def _facts(run: RunReader) -> str:
    losses, planned = _recent(run), int(run.settings("run").get("steps") or 0)
    parts = [f"step {run.last_step:,}" + (f" of {planned:,}" if planned else "")]
    key = loss_key(losses)
    if key is not None:
        parts.append(f"loss {newest(losses[key]):.3f}")
    gap = gap_of(run, losses)
    if gap is not None and run.summary.get("gap_percent") is None:  # a finished run has a verdict
        parts.append(f"{abs(gap):.2f} % {'above' if gap >= 0 else 'below'} the BF16 baseline")
    plan = run.plan
    if layers := plan.get("layers"):
        parts.append(f"{len(_fp8_layers(plan))} of {len(layers)} layers in FP8")
    return ", ".join(parts)


def _fp8_layers(plan: Mapping[str, Any]) -> list[str]:
    """Return the names of a plan's layers in FP8."""
    return [layer["name"] for layer in plan.get("layers", []) if "fp8" in layer["precision"]]


def gap_of(run: RunReader, losses: Mapping[str, Series]) -> float | None:
    """Return the loss above the baseline's in percent: on held-out text at the end, before that over the newest steps.

    `losses` are recent scalars; the mean of the newest `GAP_STEPS` counts.
    """
    final = run.summary.get("gap_percent")
    if final is not None:
        return float(final)
    series = losses.get("gap_percent")
    values = series.high[np.isfinite(series.high)] if series is not None else np.zeros(0)
    return float(values[-GAP_STEPS:].mean()) if len(values) else None


def gap_limit(run: RunReader) -> float:
    """Return the limit of the gap in percent: `GAP_LIMIT`, or its noise where that is larger.

    The noise is that of `judge_gap` once the run has finished, before that the fluctuation of its gap.
    """
    summary = gap_summary(run)
    return max(GAP_LIMIT, judge_gap(summary).noise or summary["gap_fluctuation_percent"])


def gap_summary(run: RunReader) -> Mapping[str, Any]:
    """Return the summary of a run with the fluctuation of its gap, which an unfinished run or an old one lacks."""
    series = run.scalar("gap_percent", points=200)
    return {"gap_fluctuation_percent": fluctuation((series.low + series.high) / 2)} | {
        key: value for key, value in run.summary.items() if value is not None
    }


def of_state(run: RunReader) -> Iterator[RunFinding]:
    """Yield a finding if the run failed, was interrupted, or is silent."""
    state = run.state()
    if state == "failed":
        text = run.sessions[-1].text
        yield RunFinding("unhealthy", f"the run failed{f': {text}' if text else ''}", view="events")
    elif state == "silent":
        yield RunFinding("watch", "nothing is being written: the run was killed, or hangs")
    elif state == "interrupted":
        yield RunFinding("watch", "the run was interrupted")


def of_loss(run: RunReader) -> Iterator[RunFinding]:
    """Yield findings about the loss: not a number, above the baseline's, above its minimum."""
    losses = _recent(run)
    key = loss_key(losses)
    if key is None:
        return
    if not math.isfinite(newest(losses[key])):
        yield RunFinding("unhealthy", "the loss is not a number", view="overview")
    gap = gap_of(run, losses)
    if gap is not None and gap > GAP_LIMIT and gap > (limit := gap_limit(run)):
        text = f"the loss is {gap:.1f} % above the BF16 baseline's (limit {limit:.2g} %)"
        yield RunFinding("unhealthy" if gap > HARMFUL_GAP else "watch", text, view="overview")
    rise, noise = _rise(run, key, losses[key])
    if rise > RISE_LIMIT + noise and key == "loss_fp8" and "loss_bf16" in losses:
        rise -= max(0.0, _rise(run, "loss_bf16", losses["loss_bf16"])[0])  # the text, not FP8
    if rise > RISE_LIMIT + noise:
        text = f"the loss is {rise:.0f} % above its minimum"
        yield RunFinding("unhealthy" if rise > 10 * RISE_LIMIT else "watch", text, view="overview")


def _rise(run: RunReader, key: str, recent: Series) -> tuple[float, float]:
    """Return the newest loss above the minimum in percent, both medians of several steps, and the noise of batches.

    The minimum over many medians of 10 steps lies below the true one: by about 3 standard errors of such a median,
    1.25 / sqrt(10) standard deviations each, the latter from the differences of neighbours. 0 and 0 if the run is too
    short.
    """
    values = recent.high[np.isfinite(recent.high)][-100:]
    if len(values) < 20:
        return 0.0, 0.0
    earlier = run.scalar(key, last=run.last_step - len(values) + 1, points=200)
    lows = earlier.low[np.isfinite(earlier.low)]
    if len(lows) < 20:
        return 0.0, 0.0
    lowest = min(float(np.median(lows[start : start + 10])) for start in range(0, len(lows) - 9, 5))
    # The minimum of a bucket lies below its mean, by about the spread of the newest steps.
    spread = float(np.median(values) - values.min()) if not earlier.is_exact else 0.0
    if not lowest:
        return 0.0, 0.0
    deviation = 1.4826 * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    rise = float(np.median(values)) - spread - lowest
    return 100 * rise / abs(lowest), 100 * 3 * 1.2533 / math.sqrt(10) * deviation / abs(lowest)


def of_tensors(run: RunReader) -> Iterator[RunFinding]:
    """Yield, for each share with a limit, the tensor that exceeds it most."""
    values = _newest_mean(run)
    if values is None:
        return
    tensors = run.tensors
    for stat in _PREDICATES:
        if stat not in run.stats:
            continue
        limits = np.array([LIMITS.get(f"{stat} {row.role}", LIMITS[stat]) for row in tensors])
        shares = values[:, run.stats.index(stat)]
        over = np.flatnonzero(np.nan_to_num(shares) > limits)
        if not len(over):
            continue
        number = int(over[np.argmax(shares[over] / np.maximum(limits[over], 1e-12))])
        worst, limit = tensors[number], limits[number]
        others = f", and {quantity(len(over) - 1, 'more tensor')}" if len(over) > 1 else ""
        bound = f" (limit {percent(limit)})" if limit else ""
        text = f"{percent(float(shares[number]))} of {worst.layer} {worst.role} {_PREDICATES[stat]}{bound}{others}"
        yield RunFinding("unhealthy" if stat == "nonfinite" else "watch", text, worst.layer, "layers")


def of_precision(run: RunReader) -> Iterator[RunFinding]:
    """Yield a finding if layers that began in FP8 have left it, other than by the schedule of the run."""
    began, now = (run.document("plan", first=is_first) for is_first in (True, False))
    loop = run.settings("run")
    if loop.get("last_share") and now.get("recipe") == loop.get("last_recipe"):
        return
    before, in_fp8 = _fp8_layers(began), set(_fp8_layers(now))
    left = [name for name in before if name not in in_fp8]
    if left:
        more = f" and {quantity(len(left) - 3, 'more layer')}" if len(left) > 3 else ""
        which = "the whole model" if len(left) == len(before) else f"{', '.join(left[:3])}{more}"
        yield RunFinding("watch", f"moved from FP8 to BF16: {which}", left[0], "plan")


def of_data(run: RunReader) -> Iterator[RunFinding]:
    """Yield findings about the text, for information."""
    yield from (RunFinding("healthy", f"data: {text}", view="settings") for text, _, _ in judge(run.corpus))


def of_tasks(run: RunReader) -> Iterator[RunFinding]:
    """Yield the tasks that FP8 answers worse than BF16 by more than two standard errors, and one sample."""
    for task, found in (run.summary.get("tasks") or {}).items():
        limit = max(2 * found.get("difference_error", 0), 1 / found["samples"])
        if found.get("difference", 0) < -limit:
            reference = "bf16" if "bf16" in found else "high_precision"
            values = (
                f"{percent(found['fp8'])} in FP8, {percent(found[reference])} in {reference.replace('_', ' ').upper()}"
            )
            yield RunFinding("watch", f"{task}: {values} (beyond {percent(limit)})", view="overview")


def _newest_mean(run: RunReader) -> NDArray[np.float32] | None:
    """Return the mean of the newest snapshots, (tensors, statistics), NaN without measurements; None without any."""
    taken: list[NDArray[np.float32]] = []
    newest: int | None = None
    with contextlib.suppress(StoreError):  # no more snapshots
        while len(taken) < SNAPSHOTS:
            step, values = run.snapshot(newest)
            taken.append(values)
            newest = step - 1
    if not taken:
        return None
    stack = np.stack(taken)
    counts = (~np.isnan(stack)).sum(axis=0)
    mean: NDArray[np.float32] = np.where(counts > 0, np.nansum(stack, axis=0) / np.maximum(counts, 1), np.nan)
    return mean


def of_events(run: RunReader) -> Iterator[RunFinding]:
    """Yield the number of errors and of warnings, with the last of each."""
    for level, severity in (("error", "unhealthy"), ("warning", "watch")):
        count = run.event_count(level)
        if not count:
            continue
        (newest,) = run.events(level=level, newest=1)
        is_recent = newest.step >= (1 - SHARE) * run.last_step
        which, action = ", the last" * (count > 1), f", {newest.action}" if newest.action else ""
        text = f"{quantity(count, level)}{which} at step {newest.step:,}: {newest.text}{action}"
        yield RunFinding(severity if is_recent else "healthy", text, newest.layer or "", "events")


def percent(share: float) -> str:
    """Format a share (0 to 1) as percent."""
    return f"{100 * share:.3g} %"
