"""Faults are reported, worst first, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.lab.monitor.dashboard.verdict import SNAPSHOTS, of_precision, verdict
from octavo.lab.monitor.gap import judge_gap
from octavo.lab.monitor.store import ROLES, STATS, RunReader, RunWriter, TensorRow
from octavo.lab.monitor.store.writer import Outcome

STEPS = 300
Losses = Callable[[int], float]


def falling(step: int) -> float:
    return 2 + 3 * math.exp(-step / 60)


def written(
    path: Path,
    loss: Losses = falling,
    gap: float | Losses = 0.2,
    share: dict[str, float] | None = None,
    sick: range = range(STEPS + 1),
    events: tuple[tuple[int, str], ...] = (),
    outcome: Outcome = "finished",
) -> RunReader:
    """Write a run whose `b` `grad_output` has the shares given at the steps `sick`."""
    run = RunWriter(path)
    with run.batch():
        run.set_tensors([TensorRow(layer, role) for layer in ("a", "b") for role in ROLES])
        for step in range(1, STEPS + 1):
            values = np.zeros((8, len(STATS)), dtype=np.float32)
            for stat, value in (share or {}).items():
                values[6, STATS.index(stat)] = value if step in sick else 0.0
            percent = gap if isinstance(gap, float) else gap(step)
            run.write_step(step, {"loss_fp8": loss(step), "loss_bf16": falling(step), "gap_percent": percent}, values)
        for step, level in events:
            run.write_event(step, "saturation", "it saturated", level=level, layer="b", action="moved to BF16")
    run.close(outcome, "out of memory" if outcome == "failed" else "")
    return RunReader(path)


def test_a_rise_of_both_models_is_of_the_text(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    for step in range(1, STEPS + 1):
        loss = falling(step) * (1.2 if step > 150 else 1)
        run.write_step(step, {"loss_fp8": loss, "loss_bf16": loss * 0.999, "gap_percent": 0.1})
    run.close("finished")
    assert verdict(RunReader(tmp_path)).level == "healthy"


def test_noise_of_batches_is_no_rise(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.5, STEPS + 1)
    found = verdict(written(tmp_path, loss=lambda step: 2 + float(noise[step])))
    assert found.level == "healthy", found


def test_a_run_without_fault_is_healthy(tmp_path: Path) -> None:
    found = verdict(written(tmp_path))
    assert found.level == "healthy" and found.findings == []
    assert found.text == "Healthy: step 300, loss 2.020, 0.20 % above the BF16 baseline."


@pytest.mark.parametrize(
    ("stat", "value", "level"),
    [
        ("nonfinite", 1e-6, "unhealthy"),
        ("saturated", 0.002, "watch"),
        ("saturated", 0.0005, "healthy"),
        ("flushed", 0.3, "watch"),
        ("flushed", 0.2, "healthy"),  # within the budget of gradients
        ("flushed", 0.03, "healthy"),
        ("subnormal", 0.9, "healthy"),
    ],
)
def test_tensors_are_held_against_limits(tmp_path: Path, stat: str, value: float, level: str) -> None:
    found = verdict(written(tmp_path, share={stat: value}))
    assert found.level == level
    assert [(finding.layer, finding.view) for finding in found.findings] == (
        [] if level == "healthy" else [("b", "layers")]
    )
    assert level == "healthy" or "b grad_output" in found.text


def test_what_is_over_is_over(tmp_path: Path) -> None:
    cured = range(STEPS - SNAPSHOTS + 1)
    assert verdict(written(tmp_path / "cured", share={"nonfinite": 0.5}, sick=cured)).level == "healthy"
    last = range(STEPS, STEPS + 1)
    assert verdict(written(tmp_path / "new", share={"nonfinite": 0.5}, sick=last)).level == "unhealthy"


@pytest.mark.parametrize(
    ("loss", "level", "told"),
    [
        (lambda step: math.nan if step > 290 else falling(step), "unhealthy", "the loss is not a number"),
        (lambda step: 9.0 if step > 150 else falling(step), "unhealthy", "above its minimum"),
        (lambda step: falling(step) * (1.2 if step > 150 else 1), "watch", "above its minimum"),
        (lambda step: falling(step) + (5 if step == 200 else 0), "healthy", "step 300"),
        (lambda step: falling(step) + 0.3 * math.sin(step), "healthy", "step 300"),
    ],
    ids=["nan", "diverged", "rising", "one spike", "noise"],
)
def test_the_loss(tmp_path: Path, loss: Losses, level: str, told: str) -> None:
    found = verdict(written(tmp_path, loss=loss))
    assert (found.level, told in found.text) == (level, True), found


@pytest.mark.parametrize(("gap", "level"), [(-3.0, "healthy"), (0.9, "healthy"), (1.5, "watch"), (8.0, "unhealthy")])
def test_the_gap_to_the_baseline(tmp_path: Path, gap: float, level: str) -> None:
    assert verdict(written(tmp_path, gap=gap)).level == level


@pytest.mark.parametrize(
    ("gap", "level"),
    [
        (lambda step: 1.5 * math.sin(step / 48), "healthy"),  # ends at 0 after it was at 1.5 and at -1.5
        (lambda step: 1.5 * math.sin(step / 190), "watch"),  # rises, and stays
        (lambda step: 2.0 * step / STEPS, "watch"),  # grows steadily
        (lambda step: 2.0 if step > 240 else 0.0, "watch"),  # lost at the end
        (lambda step: 8.0 if step > 20 else 0.0, "unhealthy"),  # lost at the start
        (lambda step: 1.4 if step > 250 else 2.0 * math.cos(step / 15), "healthy"),  # no further than it was before
    ],
)
def test_the_gap_is_judged_beside_its_own_fluctuation(tmp_path: Path, gap: Losses, level: str) -> None:
    found = verdict(written(tmp_path, gap=gap))
    assert found.level == level, found


def test_a_finished_run_says_what_its_gap_tells_in_the_words_of_the_terminal(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    for step in range(1, STEPS + 1):
        run.write_step(step, {"loss_fp8": falling(step), "loss_bf16": falling(step), "gap_percent": 0.1 * (-1) ** step})
    summary = {"gap_percent": 0.3, "gap_95_percent": 0.2, "gap_control_percent": 0.4, "gap_control_pairs": 8}
    run.write_document("summary", summary)
    run.close("finished")
    assert verdict(RunReader(tmp_path)).text.endswith(judge_gap(summary).text)


@pytest.mark.parametrize(
    ("events", "level", "findings"),
    [
        (((100, "warning"),), "healthy", 1),
        (((100, "warning"), (299, "warning")), "watch", 1),
        (((100, "error"),), "healthy", 1),
        (((299, "error"), (299, "warning")), "unhealthy", 2),
        (((299, "info"),), "healthy", 0),
    ],
)
def test_events(tmp_path: Path, events: tuple[tuple[int, str], ...], level: str, findings: int) -> None:
    found = verdict(written(tmp_path, events=events))
    assert (found.level, len(found.findings)) == (level, findings)
    assert all("moved to BF16" in finding.text and finding.layer == "b" for finding in found.findings)


@pytest.mark.parametrize(
    ("outcome", "level"), [("failed", "unhealthy"), ("interrupted", "watch"), ("finished", "healthy")]
)
def test_how_it_ended(tmp_path: Path, outcome: Outcome, level: str) -> None:
    found = verdict(written(tmp_path, outcome=outcome))
    assert found.level == level
    assert ("out of memory" in found.text) == (outcome == "failed")


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path):
        found = verdict(RunReader(tmp_path))
    assert found.level == "unknown" and "no step" in found.text


def test_the_worst_comes_first(tmp_path: Path) -> None:
    found = verdict(written(tmp_path, gap=1.5, share={"nonfinite": 0.5, "flushed": 0.5}))
    assert [finding.level for finding in found.findings] == ["unhealthy", "watch", "watch"]
    assert found.text.startswith("Unhealthy: 50 % of b grad_output is not finite.")


@pytest.mark.parametrize(
    ("left", "said"),
    [([], ""), (["b"], "moved from FP8 to BF16: b"), (["a", "b"], "moved from FP8 to BF16: the whole model")],
)
def test_layers_that_have_left_fp8_are_named(tmp_path: Path, left: list[str], said: str) -> None:
    with RunWriter(tmp_path) as run:
        for gone in ([], left):
            layers = [{"name": name, "precision": "bf16" if name in gone else "fp8/fp8/fp8"} for name in ("a", "b")]
            run.write_document("plan", {"layers": [*layers, {"name": "head", "precision": "bf16"}]}, step=len(gone))
    assert [finding.text for finding in of_precision(RunReader(tmp_path))] == ([said] if said else [])


@pytest.mark.parametrize(("share", "said"), [(0.2, 0), (0.0, 1)])
def test_layers_that_leave_fp8_by_schedule_are_no_finding(tmp_path: Path, share: float, said: int) -> None:
    with RunWriter(tmp_path) as run:
        run.write_document("config", {"run": {"last_share": share, "last_recipe": "bf16"}})
        for recipe, precision in (("folded", "fp8/fp8/fp8"), ("bf16", "bf16/bf16/bf16")):
            plan = {"recipe": recipe, "layers": [{"name": "a", "precision": precision}]}
            run.write_document("plan", plan, step=int(recipe == "bf16"))
    assert len([*of_precision(RunReader(tmp_path))]) == said
