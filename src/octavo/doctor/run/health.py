"""A run's health, from what it wrote: what the dashboard's verdict is made of, each with what to do."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.dashboard import verdict
from octavo.doctor.check import Finding, check, failure, ok, skipped, warning
from octavo.monitor.store import RunReader


@check(
    "run",
    symptom="a run has stopped, or nothing is written any more",
    remedy="Look at the end of its log, then continue from the last checkpoint: octavo train RUN/config.json --resume.",
)
def state(run: RunReader) -> Finding:
    """Did it fail, was it killed or interrupted, has it fallen silent?"""
    return judge(verdict.of_state(run), f"{run.state()}, {run.last_step:,} steps")


@check(
    "loss",
    symptom="the loss rises, or is above that of the BF16 twin",
    remedy="Lower the learning rate (--lr), or take a finer recipe. 'drift' tells whether FP8 is to blame.",
)
def loss(run: RunReader) -> Finding:
    """Is the loss a number, near the twin's, and near the lowest it had?"""
    return judge(verdict.of_loss(run), "near its lowest") if run.last_step else skipped("no step was made yet")


@check(
    "tensors",
    symptom="a layer learns badly",
    remedy="Give that layer a finer recipe, or keep it in BF16; for kept scales take a margin, or just_in_time.",
)
def tensors(run: RunReader) -> Finding:
    """Are codes saturated, flushed to zero or not finite?"""
    if not run.tensors:
        return skipped("the run has no telemetry")
    broken = "Look where it began (octavo.observed), and go back to the checkpoint before it."
    return judge(verdict.of_tensors(run), f"{len(run.tensors)} tensors within their limits", broken)


@check(
    "events",
    symptom="the log shows warnings",
    remedy="Read them on the page: octavo dashboard RUN.",
)
def events(run: RunReader) -> Finding:
    """Which warnings and errors were there, and when was the last?"""
    return judge(verdict.of_events(run), "no warning and no error")


def judge(findings: Iterable[verdict.Finding], well: str, unhealthy: str = "") -> Finding:
    """Return the worst of the dashboard's findings, and all of them as rows.

    Args:
        well: what was seen where there are none.
        unhealthy: the remedy of an unhealthy one, in place of the check's.
    """
    found = verdict.worst_first(findings)
    if not found:
        return ok(well)
    rows = [{"level": finding.level, "layer": finding.layer, "finding": finding.text} for finding in found]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    seen = f"{found[0].text}{more}"
    if found[0].level == "unhealthy":
        return failure(seen, remedy=unhealthy, rows=rows)
    return (warning if found[0].level == "watch" else ok)(seen, rows=rows)
