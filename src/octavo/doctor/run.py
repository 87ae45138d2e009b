"""Checks of a recorded run: the dashboard's verdict, each finding with a remedy."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.doctor.check import Finding, check, failure, ok, skipped, warning
from octavo.monitor.dashboard import verdict
from octavo.monitor.store import RunReader


@check(
    "run",
    symptom="a run has stopped, or writes nothing any more",
    remedy="Read the end of its log, then resume from the last checkpoint: octavo train RUN --resume.",
)
def state(run: RunReader) -> Finding:
    """Check for failed, killed, interrupted or silent runs."""
    return judge_findings(verdict.of_state(run), f"{run.state()}, {run.last_step:,} steps")


@check(
    "loss",
    symptom="the loss rises, or stays above that of the BF16 baseline",
    remedy="Lower the learning rate (--lr), or use a finer recipe. The check 'drift' shows whether FP8 is the cause.",
)
def loss(run: RunReader) -> Finding:
    """Check that the loss is finite, near the twin's, and near its own minimum."""
    return judge_findings(verdict.of_loss(run), "near its lowest") if run.last_step else skipped("no step yet")


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
    return judge_findings(verdict.of_tensors(run), f"{len(run.tensors)} tensors within their limits", broken)


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
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    seen = f"{found[0].text}{more}"
    if found[0].level == "unhealthy":
        return failure(seen, remedy=unhealthy, rows=rows)
    return (warning if found[0].level == "watch" else ok)(seen, rows=rows)
