"""The dashboard's findings as checks with remedies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.doctor import run as checks
from octavo.doctor.check import Check, run_check
from octavo.monitor.store import ROLES, STATS, RunReader, RunWriter, TensorRow
from octavo.monitor.store.writer import Outcome

STEPS = 60


def written(
    path: Path,
    *,
    last_loss: float = 2.0,
    gap: float = 0.2,
    share: tuple[str, float] = ("flushed", 0.0),
    event: str = "",
    outcome: Outcome = "finished",
) -> RunReader:
    run = RunWriter(path)
    with run.batch():
        run.set_tensors([TensorRow("wq", role) for role in ROLES])
        for step in range(1, STEPS + 1):
            values = np.zeros((len(ROLES), len(STATS)), dtype=np.float32)
            values[ROLES.index("grad_output"), STATS.index(share[0])] = share[1]
            loss = last_loss if step == STEPS else 2.0
            run.write_step(step, {"loss_fp8": loss, "loss_bf16": 2.0, "gap_percent": gap}, values)
        if event:
            run.write_event(STEPS, "saturation", "it saturated", level=event, layer="wq")
    run.close(outcome, "out of memory" if outcome == "failed" else "")
    return RunReader(path)


def test_a_run_without_fault(tmp_path: Path) -> None:
    run = written(tmp_path)
    found = {check.name: run_check(check, run) for check in (checks.state, checks.loss, checks.tensors, checks.events)}
    assert {name: str(result.finding.verdict) for name, result in found.items()} == dict.fromkeys(found, "ok")
    assert found["run"].finding.seen == "finished, 60 steps"
    assert found["tensors"].finding.seen == f"{len(ROLES)} tensors within their limits"


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "seen", "remedy"),
    [
        ({"outcome": "failed"}, checks.state, "failure", "the run failed: out of memory", "--resume"),
        ({"outcome": "interrupted"}, checks.state, "warning", "interrupted", "--resume"),
        ({"last_loss": float("nan")}, checks.loss, "failure", "not a number", "drift"),
        ({"gap": 3.0}, checks.loss, "warning", "3.0 % above the BF16 baseline's", "drift"),
        ({"gap": 9.0}, checks.loss, "failure", "9.0 % above the BF16 baseline's", "drift"),
        ({"share": ("saturated", 0.01)}, checks.tensors, "warning", "wq grad_output saturates", "finer recipe"),
        ({"share": ("nonfinite", 0.01)}, checks.tensors, "failure", "wq grad_output is not finite", "octavo.observed"),
        ({"event": "warning"}, checks.events, "warning", "it saturated", "octavo dashboard"),
        ({"event": "error"}, checks.events, "failure", "it saturated", "octavo dashboard"),
    ],
)
def test_a_fault_is_found_by_one_check(
    tmp_path: Path, fault: dict[str, object], check: Check[RunReader], verdict: str, seen: str, remedy: str
) -> None:
    run = written(tmp_path, **fault)  # type: ignore[arg-type]
    result = run_check(check, run)
    assert result.finding.verdict == verdict and seen in result.finding.seen and remedy in result.remedy, result.finding
    others = {checks.state, checks.loss, checks.tensors, checks.events} - {check}
    assert all(run_check(other, run).finding.verdict == "ok" for other in others)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.close("finished", "")
    reader = RunReader(tmp_path)
    finding = run_check(checks.loss, reader).finding
    assert finding.verdict == "skipped", finding
    finding = run_check(checks.tensors, reader).finding
    assert finding.verdict == "skipped", finding
