"""Power between updates of a counter that is renewed now and then, whenever the block begins and ends."""

from __future__ import annotations

import threading

import pytest

from octavo.lab.monitor import power
from octavo.lab.monitor.power import PowerMeter


class Counter:
    """NVML with a counter at 700 W that is renewed every tenth reading, and a clock of ten milliseconds per reading."""

    def __init__(self, readings: int, began: int = 0, missing: str = "") -> None:
        self.missing, self.last, self.now, self.done = missing, began + readings, began, threading.Event()

    def seconds(self) -> float:
        return 0.01 * self.now

    def read(self, key: str) -> float | None:
        if key == "gpu_clock_mhz":
            return 1300.0 + 100 * (self.now // 10 % 2)
        if self.missing:
            self.done.set()
            return None
        self.now = min(self.now + 1, self.last)
        if self.now == self.last:
            self.done.set()
        return 70.0 * (self.now // 10)


def measured(monkeypatch: pytest.MonkeyPatch, counter: Counter) -> PowerMeter:
    monkeypatch.setattr(power, "POLL_S", 0.0)
    monkeypatch.setattr(power, "perf_counter", counter.seconds)
    with PowerMeter(counter) as meter:  # type: ignore[arg-type]
        assert counter.done.wait(10)
    return meter


@pytest.mark.parametrize("began", range(10))
@pytest.mark.parametrize("readings", [34, 55])
def test_power_does_not_depend_on_where_between_updates_a_block_begins(
    began: int, readings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = measured(monkeypatch, Counter(readings, began))
    assert meter.watts == pytest.approx(700.0) and meter.missing == ""
    assert meter.mhz is not None and 1300 < meter.mhz < 1400


def test_less_than_two_updates_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = measured(monkeypatch, Counter(11, began=1))
    assert (meter.watts, meter.mhz) == (None, None) and "renew" in meter.missing


def test_without_nvml_the_reason_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = measured(monkeypatch, Counter(30, missing="nvidia-ml-py is not installed"))
    assert meter.watts is None and meter.missing == "nvidia-ml-py is not installed"
