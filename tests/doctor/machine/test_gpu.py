from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.doctor.check import make
from octavo.doctor.machine import gpu
from octavo.doctor.subjects import Machine

FINE = {"gpu_clock_mhz": 1980.0, "gpu_power_watts": 690.0, "gpu_temperature": 61.0, "gpu_throttle_reasons": 4.0}
CLEAN = {"ecc": True, "uncorrected": 0, "waits_for_reset": False, "out_of_spare_rows": False}


@pytest.mark.parametrize(
    ("change", "verdict", "seen"),
    [
        ({}, "ok", "1980 MHz, 690 W, 61 C under load"),
        ({"gpu_throttle_reasons": 0x40 | 0x04}, "warning", "too hot (hardware limit)"),
        ({"gpu_throttle_reasons": 0x80}, "warning", "power supply"),
        ({"power_limit_watts": 500.0, "default_power_limit_watts": 700.0}, "warning", "limited to 500 W of 700 W"),
        ({"power_limit_watts": 700.0, "default_power_limit_watts": 700.0}, "ok", "nothing holds it back"),
    ],
)
def test_clocks_under_load(change: dict[str, float], verdict: str, seen: str) -> None:
    found = gpu.judge_clocks({**FINE, **change})
    assert found.verdict == verdict and seen in found.seen, found


def test_a_gpu_that_tells_nothing() -> None:
    assert gpu.judge_clocks({}).seen.startswith("no readings")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "ok"),
        ({"uncorrected": 2}, "failure"),
        ({"out_of_spare_rows": True}, "failure"),
        ({"waits_for_reset": True}, "warning"),
        ({"ecc": False}, "warning"),
        (dict.fromkeys(CLEAN), "ok"),
    ],
)
def test_memory_errors(change: dict[str, Any], verdict: str) -> None:
    finding = gpu.judge_memory({**CLEAN, **change})
    assert finding.verdict == verdict, finding


@pytest.mark.gpu
@pytest.mark.parametrize("check", [gpu.clocks, gpu.memory_errors])
def test_a_gpu_is_asked(check: Any) -> None:
    finding = make(check, Machine(torch.device("cuda", 0))).finding
    assert finding.verdict != "failure", finding
