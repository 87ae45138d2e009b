"""Each kernel runs, and its bytes are those it must move."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.runtime import ledger
from octavo_bench import kernels, results


def test_every_kernel_runs() -> None:
    rows = [*kernels.bench_kernels(device="cpu", repeats=1)]
    assert len(rows) == len(kernels.CASES)
    assert [row for row in rows if "error" in row] == []
    results.Result(kind="kernels", date="2026-11-21", hardware="cpu", versions={}, command="x", rows=tuple(rows))


M, N = kernels.SMALL
BF16, CODE, FP32 = 2, 1, 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quantize rows", M * N * (BF16 + CODE) + M * FP32),
        ("quantize columns", M * N * (2 * BF16 + CODE) + N * FP32),
        ("quantize folded pair", M * N * (2 * BF16 + 2 * CODE) + 2 * (M + N) * FP32 + (M + N) * FP32),
        ("quantize block pair", M * N * (BF16 + 2 * CODE) + 2 * M * N // 128 * FP32),
        ("transpose", M * N * 2 * CODE),
        ("SwiGLU backward, plain", M * N * 5 * BF16),
        ("SwiGLU, row codes, and its inputs", M * N * (2 * BF16 + 3 * CODE) + M * FP32 + 2 * M * N // 128 * FP32),
        (
            "SwiGLU backward of codes, 1x128",
            M * N * (2 * BF16 + 4 * CODE + 5 * CODE) + (2 * 2 + 5) * M * N // 128 * FP32,
        ),
        ("cross entropy in place", M * N * 2 * BF16 + M * (8 + FP32)),
    ],
)
def test_bytes_by_hand(name: str, expected: int) -> None:
    row = next(kernels.bench_kernels((name,), device="cpu", repeats=1))
    assert row["bytes"] == expected
    assert row["gb_per_s"] == pytest.approx(expected / row["ms"] / 1e6, rel=0.05, abs=0.06)


def test_names_choose_by_their_beginning() -> None:
    rows = [*kernels.bench_kernels(("transpose", "rotary"), device="cpu", repeats=1)]
    assert {row["kernel"] for row in rows} == {"transpose", "rotary"}


def test_a_kernel_that_fails_or_falls_back_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: torch.Tensor) -> None:
        raise ValueError("broken")

    def falls_back(x: torch.Tensor) -> None:
        ledger.fall_back("add ran as reference")

    def adds(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    cases = [
        kernels.Case(call.__name__, (8, 8), lambda draw, m, n: (draw(m, n),), call)
        for call in (fails, falls_back, adds)
    ]
    monkeypatch.setattr(kernels, "CASES", cases)
    rows = [*kernels.bench_kernels(device="cpu", repeats=1)]
    assert [row.get("error") for row in rows] == ["ValueError: broken", "UnsupportedError: add ran as reference", None]
    assert rows[2]["bytes"] == 2 * 8 * 8 * BF16


def test_results_are_counted_however_nested() -> None:
    x = torch.zeros(3)
    assert kernels._bytes((x, [None, (x, "text")], 4)) == 2 * 3 * FP32
