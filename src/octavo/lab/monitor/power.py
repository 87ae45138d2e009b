"""Mean power and clock of a GPU over a block of code, from NVML's energy counter."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from octavo.lab.monitor.system import SystemProbe

POLL_S = 0.01
"""Seconds between two looks at the counter: the error of the time of an update."""


class PowerMeter:
    """Measures the power that a GPU draws while a block runs: `with PowerMeter(probe) as power: ...`.

    NVML renews its counter of energy about ten times per second. The difference of two readings at any times is thus
    wrong by up to a tenth of a second: a fifth of half a second, a twentieth of two seconds. A thread waits for the
    updates, and power is that between the first and the last of the block, which should keep the GPU busy throughout.
    """

    def __init__(self, probe: SystemProbe) -> None:
        self._probe = probe
        self._updates: list[tuple[float, float]] = []
        """Seconds and joules of each update of the counter."""
        self._clocks: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octavo-power", daemon=True)

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        before = self._probe.read("gpu_energy_joules")
        while before is not None and not self._stop.wait(POLL_S):
            joules = self._probe.read("gpu_energy_joules")
            if joules is not None and joules != before:
                self._updates.append((perf_counter(), joules))
                self._clocks.append(self._probe.read("gpu_clock_mhz") or 0.0)
            before = joules

    @property
    def watts(self) -> float | None:
        """Mean power of the board; None if `missing`."""
        if len(self._updates) < 2:
            return None
        (began, first), *_, (ended, last) = self._updates
        return (last - first) / (ended - began)

    @property
    def mhz(self) -> float | None:
        """Mean clock of the multiprocessors; None if `missing`."""
        return sum(self._clocks) / len(self._clocks) if len(self._updates) > 1 else None

    @property
    def missing(self) -> str:
        """Reason for missing figures; empty if there are some."""
        if self.watts is not None:
            return ""
        return self._probe.missing or "NVML counts no energy of this GPU, or did not twice renew its counter meanwhile"
