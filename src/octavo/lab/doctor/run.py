"""Checks of a recorded run: the dashboard's verdict, each finding with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo._util.terminal import and_more, quantity
from octavo.lab.doctor.check import Finding, Verdict, check, failure, ok, skipped, warning
from octavo.lab.monitor.dashboard import verdict
from octavo.lab.monitor.gap import judge_gap
from octavo.lab.monitor.store import RunReader


@check(
    "run",
    symptom="a run has stopped, or writes nothing any more",
    remedy="Read the end of its log, then resume from the last checkpoint: octavo train RUN --resume.",
)
def state(run: RunReader) -> Finding:
    """Check for failed, killed, interrupted or silent runs."""
    return judge_findings(verdict.of_state(run), f"{run.state()}, {quantity(run.last_step, 'step')}")


@check(
    "loss",
    symptom="the loss rises, or stays above that of the BF16 baseline",
    remedy="Lower the learning rate (--lr), or use a finer recipe. The check 'drift' shows whether FP8 is the cause.",
)
def loss(run: RunReader) -> Finding:
    """Check that the loss is finite, close to the baseline's and to its own minimum; suggest remedies by evidence."""
    if not run.last_step:
        return skipped("no step yet")
    told = judge_gap(verdict.gap_summary(run)).text
    found = judge_findings(verdict.of_loss(run), f"near its lowest. {told}".removesuffix(". "))
    return found if found.verdict == Verdict.OK else replace(found, remedy=remedies(run))


OVERFLOWS = 0.01
"""Usual share of steps that overflow with a dynamic loss scale: one per window when it is doubled."""
SPIKE = 10.0
"""Largest gradient norm over the median that clipping lets pass unnoticed."""


class Advice(NamedTuple):
    """A suggestion for an unstable run."""

    evidence: float
    """Measured value relative to its limit; 1 or more counts as evidence."""
    what: str
    seen: str
    remedy: str


def advice(run: RunReader) -> list[Advice]:
    """Return what could make a run unstable: the one with most evidence first, those without any last."""
    series = run.scalars(points=2000)
    last, events = max(run.last_step, 1), run.events()
    skipped_steps = max((verdict.newest(series.get(key)) for key in series if key.startswith("overflows")), default=0.0)
    norms = next((series[key].high for key in series if key.startswith("gradient_norm")), np.zeros(0))
    norms = norms[np.isfinite(norms)]
    spike = float(norms.max() / np.median(norms)) if len(norms) and np.median(norms) > 0 else 0.0
    gap, limit = verdict.gap_of(run, series) or 0.0, verdict.gap_limit(run)
    tensors = [finding.text for finding in verdict.of_tensors(run)]
    causes = Counter(event.text.partition(":")[0] for event in events if event.level != "info")
    rises = [finding.text for finding in verdict.of_loss(run) if "minimum" in finding.text]
    found = [
        Advice(skipped_steps / last / OVERFLOWS, "loss scale", f"{skipped_steps:.0f} of {last} steps overflowed",
               "start lower (--loss-scale-start), or use none: BF16 has the range of FP32"),
        Advice(spike / SPIKE, "clip", f"the gradient norm reached {spike:.0f} times its median",
               "clip at 1.0 (--clip), a single layer lower (clip_per_group)"),
        Advice(causes["optimizer"] + len(rises) * (gap <= limit), "optimizer",
               rises[0] if rises else f"blamed by {quantity(causes['optimizer'], 'event')}",
               "lower --lr, lengthen --warmup, lower the second beta"),
        Advice(max(gap / limit, len(tensors) + causes["precision"]), "recipe",
               tensors[0] if tensors else f"{gap:.1f} % above the BF16 baseline",
               "a finer recipe, or layers in BF16: the check 'drift' and octavo localize find which"),
        Advice(causes["data"], "data", f"a batch is blamed by {quantity(causes['data'], 'event')}",
               "look at its text; octavo train --guard.mode act skips such batches"),
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each.evidence)


def remedies(run: RunReader) -> str:
    """Return the advice as text: suggestions with evidence first, each with its measurement."""
    found = advice(run)
    lines = [f"{each.what} ({each.seen}): {each.remedy}" for each in found if each.evidence >= 1]
    rest = ", ".join(each.what for each in found if each.evidence < 1)
    numbered = "; ".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))
    also = f"Without evidence in this run: {rest}." if rest else ""
    return f"{numbered}. {also} The check 'drift' shows whether FP8 is the cause." if lines else f"{also} Try 'drift'."


@check(
    "tensors",
    symptom="a layer learns badly",
    remedy="Use a finer recipe for that layer, or keep it in BF16; for delayed scales, a margin or just_in_time.",
)
def tensors(run: RunReader) -> Finding:
    """Check for saturated, flushed and non-finite values."""
    if not run.tensors:
        return skipped("the run has no telemetry")
    broken = "Find its origin (octavo.observed), and resume from a checkpoint before it."
    return judge_findings(verdict.of_tensors(run), f"{quantity(len(run.tensors), 'tensor')} within limits", broken)


@check(
    "events",
    symptom="the log shows warnings",
    remedy="Read them in the dashboard: octavo dashboard RUN.",
)
def events(run: RunReader) -> Finding:
    """Check for recorded warnings and errors."""
    return judge_findings(verdict.of_events(run), "no warnings, no errors")


def judge_findings(findings: Iterable[verdict.RunFinding], well: str, unhealthy: str = "") -> Finding:
    """Return the worst of the dashboard's findings, with all of them as rows.

    Args:
        well: line for no findings.
        unhealthy: remedy of an unhealthy one; replaces the check's.
    """
    found = verdict.worst_first(findings)
    if not found:
        return ok(well)
    rows = [{"level": finding.level, "layer": finding.layer, "finding": finding.text} for finding in found]
    seen = f"{found[0].text}{and_more(found)}"
    if found[0].level == "unhealthy":
        return failure(seen, remedy=unhealthy, rows=rows)
    return (warning if found[0].level == "watch" else ok)(seen, rows=rows)
