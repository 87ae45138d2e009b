from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.doctor.check import make
from octavo.doctor.machine import kernels
from octavo.doctor.subjects import Machine

HERE = Machine(torch.device("cpu"))


def rows(passed: bool) -> list[dict[str, Any]]:
    row = {"recipe": "folded", "gemm": "dgrad", "kernel": "k", "sqnr_db": 28.5, "floor_db": 27.0, "passed": passed}
    return [{**row, "gemm": "fprop", "passed": True}, row]


@pytest.mark.parametrize(("passed", "verdict"), [(True, "ok"), (False, "failure")])
def test_arithmetic_that_is_too_far_from_fp64(monkeypatch: pytest.MonkeyPatch, passed: bool, verdict: str) -> None:
    monkeypatch.setattr(kernels, "selfcheck", lambda device: rows(passed))
    result = make(kernels.arithmetic, HERE)
    assert result.finding.verdict == verdict, result.finding
    assert ("folded dgrad 28.5 dB" in result.finding.seen) == ("Try other versions" in result.remedy) == (not passed)


@pytest.mark.parametrize(("passed", "verdict"), [(True, "ok"), (False, "failure")])
def test_a_kernel_that_is_compiled_wrongly(monkeypatch: pytest.MonkeyPatch, passed: bool, verdict: str) -> None:
    row = {"kernel": "transpose", "case": "257x16", "passed": passed, "detail": "" if passed else "7 bytes differ"}
    good = {"kernel": "rotary", "case": "2x3", "passed": True, "detail": "equal"}
    monkeypatch.setattr(kernels, "why_not", lambda device: None)
    monkeypatch.setattr(kernels, "check_kernels", lambda device: [good, {**good, "case": "4x5"}, row])
    result = make(kernels.triton, HERE)
    assert result.finding.verdict == verdict, result.finding
    if not passed:
        assert result.finding.seen == "transpose: 257x16: 7 bytes differ"
        assert "does not compile transpose correctly" in result.remedy and "OCTAVO_TRITON=0" in result.remedy
        assert [row["cases"] for row in result.finding.rows] == ["2 of 2 passed", "0 of 1 passed", "257x16"]


def test_a_cpu_has_no_triton_kernels_and_a_kernel_for_every_operation() -> None:
    finding = make(kernels.triton, HERE).finding
    assert finding.verdict == "skipped", finding
    found = make(kernels.choice, HERE).finding
    assert found.verdict == "ok" and "passes: reference" in found.seen, found
    reference = next(row for row in found.rows if row["kernel"] == "reference")
    assert {"quantize", "transpose", "activation", "norm"} <= set(reference["operations"].split(", "))


def test_a_reference_on_a_gpu_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "OCTAVO_TRITON=0 switches Triton kernels off"
    told = [
        {"operation": "gemm", "kernel": "scaled_mm.row", "available": True, "reason": ""},
        {"operation": "norm", "kernel": "triton", "available": False, "reason": reason},
        {"operation": "norm", "kernel": "reference", "available": True, "reason": ""},
    ]
    monkeypatch.setattr(kernels.kernels, "explain", lambda device: told)
    result = make(kernels.choice, Machine(torch.device("cuda")))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == f"the reference computes norm: {reason}"
    assert "leave OCTAVO_TRITON unset" in result.remedy
