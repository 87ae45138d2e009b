"""Whether a step is launch-bound, told by a clock whose host and device are as fast as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.doctor.check import make
from octavo.doctor.model.launches import TRACE, Clock, Timing, judge, launches, measure
from octavo.doctor.subjects import Trial

Try = Callable[..., Trial]


class Fake(Clock):
    """A host that launches a kernel in 10 us, and a device that runs one in `kernel` us. A wait takes the device's."""

    def __init__(self, kernel: float, pause: float = 0.0) -> None:
        self.kernel, self.pause = kernel * 1e-6, pause * 1e-6
        self.host = self.device = self.worked = 0.0

    def launch(self) -> None:
        self.host += 1e-5
        self.device = max(self.device, self.host) + self.kernel + self.pause
        self.worked += self.kernel

    def now(self) -> float:
        return self.host

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def busy(self, step: Callable[[], Any], trace: Path | None) -> float:
        before = self.worked
        step()
        return self.worked - before


@pytest.mark.parametrize(
    ("clock", "verdict", "seen"),
    [
        (Fake(kernel=2), "warning", "launch-bound: a step takes 1.00 ms, the device is busy for 0.20 ms"),
        (Fake(kernel=50), "ok", "the device is busy for 5.00 ms"),
        (Fake(kernel=20, pause=30), "warning", "the host is not what it waits for"),
    ],
)
def test_a_model_of_tiny_kernels_is_launch_bound(clock: Fake, verdict: str, seen: str) -> None:
    def step() -> None:
        for _ in range(100):
            clock.launch()

    finding = judge(measure(step, clock))
    assert finding.verdict == verdict and seen in finding.seen, finding


def test_a_host_that_waits_for_a_busy_device_is_not_launch_bound() -> None:
    finding = judge(Timing(host=0.010, step=0.010, busy=0.0099))
    assert finding.verdict == "ok", finding


def test_on_a_cpu_host_and_device_are_one(attempt: Try) -> None:
    finding = make(launches, attempt()).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_a_tiny_model_is_launch_bound_on_a_gpu_and_its_trace_is_written(attempt: Try, tmp_path: Path) -> None:
    trial = attempt(device="cuda")
    result = make(launches, Trial(trial.model, trial.loss, trial.step, tmp_path))
    assert result.finding.verdict == "warning" and result.finding.seen.startswith("launch-bound"), result.finding
    assert "CUDA graph" in result.remedy
    assert json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    assert torch.cuda.is_available()
