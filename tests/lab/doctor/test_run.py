"""The dashboard's findings as checks with remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.lab.doctor import run as checks
from octavo.lab.doctor.check import Check, run_check
from octavo.lab.monitor.store import ROLES, STATS, RunReader, RunWriter, TensorRow
from octavo.lab.monitor.store.writer import Outcome

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
    assert found["tensors"].finding.seen == f"{len(ROLES)} tensors within limits"


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


@pytest.mark.parametrize(
    ("scalars", "event", "first"),
    [
        ({"overflows_fp8": lambda step: step // 4}, "", "loss scale (15 of 60 steps overflowed)"),
        ({"gradient_norm_fp8": lambda step: 300.0 if step == 30 else 1.0}, "", "clip (the gradient norm reached 300"),
        ({}, "optimizer: the loss rose", "optimizer (blamed by 1 event)"),
        ({"gap_percent": lambda step: 9.0}, "", "recipe (9.0 % above the BF16 baseline)"),
        ({}, "data: a batch of zeros", "data (a batch is blamed by 1 event)"),
    ],
)
def test_advice_is_in_the_order_of_the_evidence(tmp_path: Path, scalars: Any, event: str, first: str) -> None:
    run = RunWriter(tmp_path)
    for step in range(1, STEPS + 1):
        loss = float("nan") if step == STEPS else 2.0
        run.write_step(step, {"loss_fp8": loss, **{key: float(of(step)) for key, of in scalars.items()}})
    if event:
        run.write_event(STEPS, "loss", event, level="warning")
    run.close("finished", "")
    reader = RunReader(tmp_path)
    found = checks.advice(reader)
    assert [each.evidence >= 1 for each in found] == [True, False, False, False, False], found
    remedy = run_check(checks.loss, reader).remedy
    assert remedy.startswith(f"1. {first}") and remedy.count(". ") >= 2
    assert all(f"{what}" in remedy for what in ("loss scale", "clip", "optimizer", "recipe", "data"))


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.close("finished", "")
    reader = RunReader(tmp_path)
    finding = run_check(checks.loss, reader).finding
    assert finding.verdict == "skipped", finding
    finding = run_check(checks.tensors, reader).finding
    assert finding.verdict == "skipped", finding
