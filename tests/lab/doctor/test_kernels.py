"""Kernels in use, their arithmetic and accumulation; compilers: another rounding is no fault, lost precision is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import gemm_by
from octavo.lab.doctor import kernels
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.kernels import accumulation, compiler, inputs, outputs, scaled_silu
from octavo.lab.doctor.subjects import Machine

HERE = Machine(torch.device("cpu"))


def rows(passed: bool) -> list[dict[str, Any]]:
    row = {"recipe": "folded", "gemm": "dgrad", "kernel": "k", "sqnr_db": 28.5, "floor_db": 27.0, "passed": passed}
    return [{**row, "gemm": "fprop", "passed": True}, row]


@pytest.mark.parametrize(("passed", "verdict"), [(True, "ok"), (False, "failure")])
def test_arithmetic_that_is_too_far_from_fp64(monkeypatch: pytest.MonkeyPatch, passed: bool, verdict: str) -> None:
    monkeypatch.setattr(kernels, "selfcheck", lambda device: rows(passed))
    result = run_check(kernels.arithmetic, HERE)
    assert result.finding.verdict == verdict, result.finding
    assert ("folded dgrad 28.5 dB" in result.finding.seen) == ("Try other versions" in result.remedy) == (not passed)


@pytest.mark.parametrize(("passed", "verdict"), [(True, "ok"), (False, "failure")])
def test_a_kernel_that_is_compiled_wrongly(monkeypatch: pytest.MonkeyPatch, passed: bool, verdict: str) -> None:
    row = {"kernel": "transpose", "case": "257x16", "passed": passed, "detail": "" if passed else "7 bytes differ"}
    good = {"kernel": "rotary", "case": "2x3", "passed": True, "detail": "equal"}
    monkeypatch.setattr(kernels, "triton_unsupported_reason", lambda device: None)
    monkeypatch.setattr(kernels, "check_kernels", lambda device: [good, {**good, "case": "4x5"}, row])
    result = run_check(kernels.triton, HERE)
    assert result.finding.verdict == verdict, result.finding
    if not passed:
        assert result.finding.seen == "transpose: 257x16: 7 bytes differ"
        assert "does not compile transpose correctly" in result.remedy and "OCTAVO_TRITON=0" in result.remedy
        assert [row["cases"] for row in result.finding.rows] == ["2 of 2 passed", "0 of 1 passed", "257x16"]


def test_a_cpu_has_no_triton_kernels_and_a_kernel_for_every_operation() -> None:
    finding = run_check(kernels.triton, HERE).finding
    assert finding.verdict == "skipped", finding
    found = run_check(kernels.choice, HERE).finding
    assert found.verdict == "ok" and "other kernels: reference" in found.seen, found
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
    result = run_check(kernels.choice, Machine(torch.device("cuda")))
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == f"norm run as the reference: {reason}"
    assert "leave OCTAVO_TRITON unset" in result.remedy


def test_sums_in_fp32_are_slow() -> None:
    found = run_check(accumulation, HERE).finding
    assert found.verdict == "ok" and abs(found.numbers["slow"]) < 1e-6, found


@pytest.mark.parametrize(("accumulator", "verdict"), [("hopper-slow", "ok"), ("hopper-fast", "failure")])
def test_sums_that_are_fast_where_slow_was_asked_for_are_a_fault(accumulator: str, verdict: str) -> None:
    with gemm_by(accumulator):
        result = run_check(accumulation, HERE)
    assert result.finding.verdict == verdict, result.finding
    if verdict == "failure":
        assert result.finding.numbers["slow"] < -0.01
        assert "use another build" in result.remedy


@pytest.mark.gpu
def test_a_gpu_is_slow_when_asked_and_fast_when_asked() -> None:
    found = run_check(accumulation, Machine(torch.device("cuda", 0))).finding
    assert found.verdict == "ok", found


CPU = torch.device("cpu")


def held_in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function as a compiler makes it that holds an activation in another dtype."""

    def function(x: Tensor) -> Tensor:
        return (x * torch.sigmoid(x)).to(dtype).to(x.dtype) * x.mean(dim=1, keepdim=True)

    return function


def summed_backwards(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 1)
    for column in x.flip(1).split(1, dim=1):
        total = total + column
    return x / (1 + torch.exp2(x * -1.44269504)) * total * (1 / x.shape[1])


def without_the_last_term(x: Tensor) -> Tensor:
    return scaled_silu(x) - torch.nn.functional.silu(x) * x[:, -1:] / x.shape[1]


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (summed_backwards, "ok"),
        (held_in(torch.float64), "ok"),
        (held_in(torch.float16), "failure"),
        (held_in(torch.bfloat16), "failure"),
        (without_the_last_term, "failure"),
    ],
)
def test_only_what_rounds_otherwise_is_the_same(function: Callable[[Tensor], Tensor], verdict: str) -> None:
    finding = compiler.look([outputs(scaled_silu, inputs(CPU)), outputs(function, inputs(CPU))])
    assert finding.verdict == verdict, finding


def test_rounded_once_it_is_the_same() -> None:
    """Against FP64, which is rounded to FP32 at its end alone."""
    exact = outputs(scaled_silu, inputs(CPU).double())
    finding = compiler.look([outputs(scaled_silu, inputs(CPU)), (exact[0].float(), exact[1].float())])
    assert finding.verdict == "ok", finding


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_one_wrong_element_is_found(which: int, wrong: float) -> None:
    plain = outputs(scaled_silu, inputs(CPU))
    compiled = tuple(part.clone() for part in plain)
    compiled[which][0, 0] = wrong  # where values are smallest
    finding = compiler.look([plain, (compiled[0], compiled[1])])
    assert finding.verdict == "failure", finding


@pytest.mark.gpu
def test_a_gpu_compiles() -> None:
    finding = run_check(compiler, Machine(torch.device("cuda", 0))).finding
    assert finding.verdict == "ok", finding
