"""Rows of `octavo bench phases`, from measurements that are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.conversion import make_plan
from octavo.errors import RunError
from octavo.kernels.runtime.devices import H200
from octavo.lab.models import build
from octavo.lab.models.config import ModelConfig
from octavo.lab.pilot.judging import Pilot
from octavo.lab.pilot.measuring import Measurement
from octavo.lab.train.subject import Shape
from octavo_bench import results
from octavo_bench.phases import command, rows_of


def pilot(**measured: dict[str, Any]) -> Pilot:
    model = build(ModelConfig(vocab=272, dim=128, layers=1, heads=4, ffn=256, sequence=64), 0)
    return Pilot(
        workload="mine", unit="token", tokens=8192, samples=8, data="random", device="a GPU", predicted_for="",
        capacity_gib=80.0, parameters=10**6, rows=8192, elsewhere=0.2, compiled=False, rates=H200,
        measured={name: Measurement(precision=name, **fields) for name, fields in measured.items()},
        plans={"folded": make_plan(model, "folded")},
    )  # fmt: skip


def test_a_row_per_precision_with_its_speed_by_phase() -> None:
    found = pilot(
        bf16={"step_ms": 100.0, "phases": {"forward": 30.0}, "parts": {"gemm": 60.0}, "losses": [3.0, 2.0, 2.0, 2.0]},
        fp16={"failed": "OutOfMemoryError: 3 GiB"},
        folded={
            "step_ms": 80.0, "phases": {"forward": 24.0}, "parts": {"gemm": 30.0}, "joules_per_token": 2e-3,
            "losses": [3.0, 2.1, 2.02, 2.02], "decode_ms": 4.0, "allocations": {"allocations": 12.0},
        },
    )  # fmt: skip
    rows = [*rows_of(found, Shape(8, 1024))]
    assert [row["implementation"] for row in rows] == ["bf16", "fp16", "folded"]
    assert rows[1] == {**rows[1], "error": "OutOfMemoryError: 3 GiB"} and "ms" not in rows[1]
    fp8 = rows[2]
    assert fp8["workload"] == "llama-1b, 6 layers, 8 x 1024" and fp8["ratio_to_bf16"] == 1.25
    assert fp8["speedups"] == {"forward": 1.25, "gemm": 2.0} and fp8["phases"] == {"forward": 24.0, "gemm": 30.0}
    assert fp8["mj_per_token"] == 2.0 and fp8["gap_percent"] == pytest.approx(1.0) and fp8["decode_ms"] == 4.0
    results.Result(kind="phases", date="2026-11-23", hardware="h200", versions={}, command="x", rows=tuple(rows))


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(RunError, match="`octavo pilot` predicts without one"):
        command()
