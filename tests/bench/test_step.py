"""The step bench runs every implementation on the same workload, and loses none to another's failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, RunError, UnsupportedError
from octavo.lab.train import profile
from octavo_bench import implementations, rates, results, step
from octavo_bench.implementations import Implementation
from octavo_bench.workloads import WORKLOADS


def bench(workload: Any, names: tuple[str, ...] = ()) -> list[step.Row]:
    return [*step.bench_step(step.Session(workload=workload, device="cpu", steps=2, warm_up_s=0.0), names)]


@pytest.mark.parametrize("workload", ["tiny", "tiny-model"])
def test_measures_recipes_against_bf16(workload: str) -> None:
    *rows, again = bench(WORKLOADS[workload], ("octavo folded", "octavo block"))
    assert [row["implementation"] for row in rows] == ["bf16", "octavo folded", "octavo block"]
    assert rows[0]["ratio_to_bf16"] == 1.0
    assert rows[1]["ratio_to_bf16"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"], abs=1e-3)
    assert [sum(row["fp8_gemms"].values()) > 0 for row in rows] == [False, True, True]
    assert again is rows[0] and "drift" in again
    results.Result(kind="step", date="2026-11-21", hardware="cpu", versions={}, command="x", rows=tuple(rows))


def test_every_implementation_computes_the_same_gradients_but_for_its_precision() -> None:
    rows = bench(WORKLOADS["tiny"], ("octavo folded", "octavo tensorwise", "octavo folded (eager)"))[:-1]
    norms = [row["gradient_norm"] for row in rows]
    assert norms[1:] == pytest.approx([norms[0]] * 3, rel=0.02)
    assert norms[1] == norms[3] != norms[0]


def test_weights_are_quantised_in_every_timed_step() -> None:
    rows = bench(WORKLOADS["tiny"], ("octavo folded",))[:-1]
    layers, linears = 2, 7
    assert [row["weights_quantised"] for row in rows] == [0, layers * linears]


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no implementation 'octavo foldd'. Did you mean 'octavo folded'\?"):
        bench(WORKLOADS["tiny"], ("octavo foldd",))


def _with(monkeypatch: pytest.MonkeyPatch, **convert: object) -> None:
    """Put implementations in place of all others."""
    known = {name: Implementation(name=name, convert=made) for name, made in convert.items()}  # type: ignore[arg-type]
    monkeypatch.setattr(step, "implementations", lambda head: known)


def test_one_that_fails_has_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: torch.nn.Module, tokens: int) -> None:
        raise torch.OutOfMemoryError("no memory left\nsecond line")

    _with(monkeypatch, bf16=implementations._leave, broken=fails, good=implementations._leave)
    rows = bench(WORKLOADS["tiny"])[:-1]
    assert rows[1] == {"workload": "tiny", "implementation": "broken", "error": "OutOfMemoryError: no memory left"}
    assert [set(row) >= {"ms", "ratio_to_bf16"} for row in rows] == [True, False, True]


def test_without_the_baseline_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: torch.nn.Module, tokens: int) -> None:
        raise ValueError("broken")

    _with(monkeypatch, bf16=fails)
    with pytest.raises(RunError, match=r"baseline bf16 failed.*ValueError: broken"):
        bench(WORKLOADS["tiny"])


def test_a_step_of_nan_is_not_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(model: torch.nn.Module, tokens: int) -> None:
        next(model.parameters()).data.fill_(torch.nan)

    _with(monkeypatch, bf16=implementations._leave, poisoned=poison)
    assert "gradients are not finite" in bench(WORKLOADS["tiny"])[1]["error"]


def test_a_row_in_which_nothing_ran_in_fp8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, **{"bf16": implementations._leave, "octavo folded": implementations._leave})
    row = bench(WORKLOADS["tiny"])[1]
    assert "no GEMM ran in FP8" in row["error"] and "ms" not in row


PROFILE = profile.Profile(
    parts={"gemm": 4.0, "attention": 1.0, "elementwise": 2.0, "optimizer": 0.5, "communication": 0.0},
    busy=7.25,
    kernels=[{"name": f"k{i}", "calls": 1.0, "ms": 1.0} for i in range(30)],
)


def test_a_trace_has_the_longest_kernels(tmp_path: Path) -> None:
    step._write_trace(tmp_path / "new", "tiny", "octavo folded (eager)", PROFILE)
    trace = json.loads((tmp_path / "new" / "tiny-octavo-folded-eager.json").read_text())
    assert trace["implementation"] == "octavo folded (eager)"
    assert [kernel["name"] for kernel in trace["kernels"]] == [f"k{i}" for i in range(step.TRACED)]


def test_short_steps_are_profiled_more_often() -> None:
    assert [step._profiled_steps(ms) for ms in (232.0, 70.0, 60.0, 1.5)] == [3, 3, 4, 134]


def test_a_row_without_a_fused_attention_is_an_error() -> None:
    step._check_attention(Implementation(name="te"), PROFILE)
    with pytest.raises(UnsupportedError, match=r"te: its attention was not fused.* Its longest kernels: k0, k1"):
        step._check_attention(Implementation(name="te"), replace(PROFILE, parts=PROFILE.parts | {"attention": 0.0}))
    with pytest.raises(RunError, match="te: the profiler saw no kernel"):
        step._check_attention(Implementation(name="te"), replace(PROFILE, kernels=[], parts={}))


def test_a_row_says_how_far_it_is_from_the_floor() -> None:
    workload = WORKLOADS["tiny"]
    session = step.Session(workload=workload, device="cpu")
    baseline = {"ms": 10.0, "attention_ms": 3.0}
    limits = rates.Rates(copy_gb_per_s=1e9, tflops=dict.fromkeys((*rates.PRECISIONS, "bf16"), 1e9))
    step._compare(session, baseline, baseline, Implementation(name="bf16"), limits)
    row = {"ms": 5.0, "attention_ms": 4.0}
    step._compare(session, row, baseline, Implementation(name="fp8"), limits)
    assert baseline["rates"]["copy_gb_per_s"] == 1e9 and "rates" not in row
    assert row["ratio_to_bf16"] == 2.0
    assert row["floor_ms"] == 3.0  # the baseline's attention: all else takes no time at these rates
    assert row["fraction_of_floor"] == 0.6
    row = {"ms": 5.0}
    step._compare(session, row, baseline, Implementation(name="half", has_floor=False), limits)
    assert row == {"ms": 5.0, "ratio_to_bf16": 2.0}


@pytest.mark.gpu
def test_a_gpu_says_where_time_goes(tmp_path: Path) -> None:
    session = step.Session(workload=WORKLOADS["tiny-model"], steps=3, warm_up_s=0.0, trace=tmp_path)
    torch.compiler.reset()  # tests before it in this process may have used up the recompilations of a block
    for row in step.bench_step(session, ("octavo folded",)):
        parts = ("gemm", "attention", "elementwise", "optimizer", "idle")
        assert all(row[f"{part}_ms"] >= 0 for part in parts) and row["optimizer_ms"] > 0
        assert row["peak_gib"] > 0 and row["floor_ms"] > 0
    assert len(list(tmp_path.iterdir())) == 2


def test_energy_is_per_token_or_says_why_it_is_not_known() -> None:
    power = SimpleNamespace(watts=640.0, mhz=1412.4, missing="")
    found = rates.energy_row(power, "mj_per_token", 5.0 / 400)  # type: ignore[arg-type]
    assert found == {"mj_per_token": 8.0, "watts": 640.0, "mhz": 1412}
    unknown = SimpleNamespace(watts=None, mhz=None, missing="nvidia-ml-py is not installed")
    assert rates.energy_row(unknown, "mj_per_token", 1.0) == {"energy_missing": unknown.missing}  # type: ignore[arg-type]
