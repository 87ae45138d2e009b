"""Every kernel that takes the operands is timed, BF16 first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from octavo.errors import ConfigError
from octavo.kernels.gemm import KERNELS
from octavo.kernels.runtime.dispatch import planning_for
from octavo.numerics import PER_ROW, Quantized, quantize
from octavo_bench import gemm, results


def test_each_kernel_is_timed_with_the_operands_it_takes() -> None:
    rows = [*gemm.bench_gemm(((32, 48, 256), (16, 16, 128)), device="cpu", repeats=1)]
    for shape in ("32x48x256", "16x16x128"):
        of_shape = [row for row in rows if row["shape"] == shape]
        assert (of_shape[0]["kernel"], of_shape[0]["ratio_to_bf16"]) == ("bf16", 1.0)
        found = {(row["kernel"], row["operands"]) for row in of_shape}
        assert {("reference", operands) for operands in gemm.OPERANDS} <= found
        assert ("scaled_mm.row", "tensor") not in found
    first = rows[1]
    m, n, k = 32, 48, 256
    assert first["tflops"] == pytest.approx(2 * m * n * k / first["ms"] / 1e9, rel=0.2, abs=1e-3)
    results.Result(kind="gemm", date="2026-11-21", hardware="cpu", versions={}, command="x", rows=tuple(rows))


def test_a_kernel_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("illegal instruction\nmore")

    broken = replace(KERNELS[-1], name="broken", unsupported_reason=lambda a, b: None, run=fails)  # type: ignore[arg-type]
    monkeypatch.setattr(gemm, "KERNELS", (broken, KERNELS[-1]))
    rows = [*gemm.bench_gemm(((16, 16, 128),), device="cpu", repeats=1)]
    errors = {row["kernel"]: row.get("error") for row in rows}
    assert errors == {"bf16": None, "broken": "RuntimeError: illegal instruction", "reference": None}


def test_the_own_kernel_is_timed_with_fp8_where_there_is_one() -> None:
    rows = quantize(torch.ones(16, 16), "e4m3", "row")
    assert gemm.OWN.unsupported_reason(rows, rows) == "it takes E4M3 with row scales, on a GPU"
    with planning_for("h200"), FakeTensorMode():
        codes, scale = torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(16, 1, device="cuda")
        on_gpu = Quantized(codes, scale, PER_ROW)
        assert gemm.OWN.unsupported_reason(on_gpu, on_gpu) is None
    with planning_for("b200"):
        assert "does not run on this GPU" in str(gemm.OWN.unsupported_reason(on_gpu, on_gpu))


def test_energy_per_operation_is_a_table_where_it_was_measured() -> None:
    row = {"shape": "8x8x8", "kernel": "bf16", "operands": "bf16", "accumulate": "slow", "pj_per_flop": 0.906}
    fp8 = row | {"kernel": "scaled_mm.row", "operands": "row", "pj_per_flop": None}
    assert gemm.energy_by_kernel([row, fp8]).splitlines()[::2] == ["| M x N x K | BF16 |", "| 8 x 8 x 8 | 0.91 |"]
    assert gemm.energy_by_kernel([fp8]) == ""


@pytest.mark.parametrize("text", ["", "8192", "8192x4096", "8x8x0", "8x8xk", "8x8x8x8"])
def test_a_shape_is_three_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="is not MxNxK"):
        gemm.parse_shape(text)


def test_a_shape_is_read() -> None:
    assert gemm.parse_shape("8192x128256x4096") == (8192, 128256, 4096)
