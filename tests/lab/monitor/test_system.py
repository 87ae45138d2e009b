from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.lab.monitor.system import SYSTEM_KEYS, SystemProbe, environment


class NVMLError(Exception):
    pass


def fake_nvml(energy: list[int]) -> SimpleNamespace:
    """NVML as nvidia-ml-py has it: milliwatts, millijoules, percent."""

    def unsupported(handle: object) -> int:
        raise NVMLError("Not Supported")

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda identity: identity,
        nvmlDeviceGetPowerUsage=lambda handle: 612_345,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: energy.pop(0),
        nvmlDeviceGetTemperature=lambda handle, sensor: 60 + sensor,
        nvmlDeviceGetClockInfo=lambda handle, clock: 1980 * clock,
        nvmlDeviceGetCurrentClocksThrottleReasons=unsupported,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97, memory=40),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=70 << 30, total=140 << 30),
    )


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(uuid="1-2-3"))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda gpu: 7)


def test_units_and_what_a_gpu_cannot_tell(monkeypatch: pytest.MonkeyPatch, a_gpu: None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(energy=[5_000_000, 5_000_000, 5_061_000]))
    probe = SystemProbe(0)
    assert probe.missing == ""
    first, second = probe.sample(), probe.sample()
    assert (first["gpu_energy_joules"], second["gpu_energy_joules"]) == (0.0, pytest.approx(61.0))
    assert first["gpu_power_watts"] == pytest.approx(612.345)
    assert (first["gpu_utilisation"], first["gpu_temperature"], first["gpu_clock_mhz"]) == (0.97, 60, 1980)
    assert first["gpu_memory_bytes"] == 70 << 30 and first["torch_peak_bytes"] == 7
    assert "gpu_throttle_reasons" not in first  # not supported here: left out, not zero
    assert first.keys() <= SYSTEM_KEYS.keys()


def test_without_the_package_the_rest_is_measured_and_the_reason_kept(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    probe = SystemProbe(0)
    assert 'pip install "octavo[energy]"' in probe.missing
    sample = probe.sample()
    assert "gpu_power_watts" not in sample and sample["torch_allocated_bytes"] == 7


def test_a_driver_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch, a_gpu: None) -> None:
    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded")

    nvml = fake_nvml([])
    nvml.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert "Driver Not Loaded" in SystemProbe(0).missing


def test_a_cpu_has_memory_and_load() -> None:
    probe = SystemProbe(None)
    sample = probe.sample()
    assert probe.missing == "" and sample.keys() <= {"process_memory_bytes", "load"}
    if sys.platform == "linux":
        assert 1 << 20 < sample["process_memory_bytes"] < 1 << 40


def test_the_commit_is_read_without_running_what_a_clone_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, witness = tmp_path / "program", tmp_path / "was-run"
    program.write_text(f"#!/bin/sh\ntouch {witness}\n")
    program.chmod(0o755)
    folder = tmp_path / "clone"
    for command in (
        ["init", "--quiet", str(folder)],
        ["-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "one"],
        ["-C", str(folder), "config", "core.fsmonitor", str(program)],
    ):
        subprocess.run(["git", *command], check=True)
    monkeypatch.chdir(folder)
    read = environment(torch.device("cpu"))["commit"]
    assert not witness.exists()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert read == head[:12]
