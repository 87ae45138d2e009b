from __future__ import annotations

import pytest
import torch

from octavo import kernels
from octavo.doctor.check import make
from octavo.doctor.machine.accumulation import accumulation
from octavo.doctor.subjects import Machine

HERE = Machine(torch.device("cpu"))


def test_sums_in_fp32_are_slow() -> None:
    found = make(accumulation, HERE).finding
    assert found.verdict == "ok" and abs(found.numbers["slow"]) < 1e-6, found


@pytest.mark.parametrize(("accumulator", "verdict"), [("hopper-slow", "ok"), ("hopper-fast", "failure")])
def test_sums_that_are_fast_where_slow_was_asked_for_are_a_fault(accumulator: str, verdict: str) -> None:
    with kernels.gemm_by(accumulator):
        result = make(accumulation, HERE)
    assert result.finding.verdict == verdict, result.finding
    if verdict == "failure":
        assert result.finding.numbers["slow"] < -0.01
        assert "train with another one" in result.remedy


@pytest.mark.gpu
def test_a_gpu_is_slow_when_asked_and_fast_when_asked() -> None:
    found = make(accumulation, Machine(torch.device("cuda", 0))).finding
    assert found.verdict == "ok", found
