"""Clocks, memory errors, shared memory, disk and open files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.lab.doctor import hardware
from octavo.lab.doctor.check import Finding, run_check
from octavo.lab.doctor.subjects import Machine

FINE = {"gpu_clock_mhz": 1980.0, "gpu_power_watts": 690.0, "gpu_temperature": 61.0, "gpu_throttle_reasons": 4.0}
CLEAN = {"ecc": True, "uncorrected": 0, "waits_for_reset": False, "out_of_spare_rows": False}


@pytest.mark.parametrize(
    ("change", "verdict", "seen"),
    [
        ({}, "ok", "1980 MHz, 690 W, 61 C under load"),
        ({"gpu_throttle_reasons": 0x40 | 0x04}, "warning", "thermal limit (hardware)"),
        ({"gpu_throttle_reasons": 0x80}, "warning", "power brake"),
        ({"power_limit_watts": 500.0, "default_power_limit_watts": 700.0}, "warning", "limited to 500 W of 700 W"),
        ({"power_limit_watts": 700.0, "default_power_limit_watts": 700.0}, "ok", "limited by its power cap only"),
    ],
)
def test_clocks_under_load(change: dict[str, float], verdict: str, seen: str) -> None:
    found = hardware.clocks.look({**FINE, **change})
    assert found.verdict == verdict and seen in found.seen, found


def test_a_gpu_that_tells_nothing() -> None:
    assert hardware.clocks.look({}).seen.startswith("no readings")


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
    finding = hardware.memory_errors.look({**CLEAN, **change})
    assert finding.verdict == verdict, finding


@pytest.mark.gpu
@pytest.mark.parametrize("check", [hardware.clocks, hardware.memory_errors])
def test_a_gpu_is_asked(check: Any) -> None:
    finding = run_check(check, Machine(torch.device("cuda", 0))).finding
    assert finding.verdict != "failure", finding


@pytest.mark.parametrize(
    ("judge", "value", "verdict"),
    [
        (hardware.shared_memory.look, 0.0625, "warning"),
        (hardware.shared_memory.look, 8.0, "ok"),
        (hardware.shared_memory.look, None, "skipped"),
        (hardware.disk.look, 0.4, "failure"),
        (hardware.disk.look, 5.0, "warning"),
        (hardware.disk.look, 500.0, "ok"),
        (hardware.open_files.look, 256, "warning"),
        (hardware.open_files.look, 65536, "ok"),
        (hardware.open_files.look, -1, "ok"),
    ],
)
def test_limits(judge: Callable[[float | None], Finding], value: float | None, verdict: str) -> None:
    finding = judge(value)
    assert finding.verdict == verdict, finding


def test_a_folder_that_is_not_there_yet_lies_on_a_disk(tmp_path: Path) -> None:
    found = run_check(hardware.disk, Machine(torch.device("cpu"), tmp_path / "runs" / "mine")).finding
    assert found.numbers["free_gib"] > 0


def test_the_remedy_of_a_small_shared_memory_is_a_flag_of_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=hardware.GIB / 16))
    result = run_check(hardware.shared_memory, Machine(torch.device("cpu")))
    assert result.finding.seen == "/dev/shm has 0.06 GiB" and "--shm-size" in result.remedy
