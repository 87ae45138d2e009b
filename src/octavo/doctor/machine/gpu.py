"""A GPU's clocks under load and its memory errors, where NVML answers."""

from __future__ import annotations

import time
from typing import Any

import torch

from octavo.doctor.check import Finding, check, failure, ok, warning
from octavo.doctor.subjects import Machine, a_gpu
from octavo.monitor.system import SystemProbe

LOAD_SECONDS = 1.0
_UNCORRECTED, _SINCE_START, _OF_MULTIPROCESSORS = 1, 0, 1
"""NVML's numbers for what is asked."""
BRAKES = {
    0x08: "hardware slows it down",
    0x20: "it is too hot (software limit)",
    0x40: "it is too hot (hardware limit)",
    0x80: "the power supply slows it down",
}
"""NVML's bits of reasons for lower clocks. Those that are left out are usual, such as the limit of its power."""


class Gpu(SystemProbe):
    """What NVML says of one GPU; None for what it cannot tell."""

    @classmethod
    def of(cls, machine: Machine) -> Gpu:
        """Return the GPU of a machine."""
        return cls(machine.device.index or 0)

    def under_load(self) -> dict[str, float]:
        """Multiply for a second, and return what `SystemProbe.sample` saw near its end."""
        x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=torch.device("cuda", self.gpu or 0))
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            for _ in range(20):
                x @ x
            sample = self.sample()
            torch.cuda.synchronize()
        return sample

    def limits(self) -> dict[str, float | None]:
        """Return the power limits in watts, in force and by default, and the highest clock in MHz."""
        power = "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementDefaultLimit"
        limit, default = (self._ask(name) for name in power)
        return {
            "power_limit_watts": None if limit is None else limit / 1e3,
            "default_power_limit_watts": None if default is None else default / 1e3,
            "highest_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", _OF_MULTIPROCESSORS),
        }

    def memory_errors(self) -> dict[str, Any]:
        """Return ECC's state, errors that it could not correct since the driver started, and rows replaced."""
        mode, remapped = self._ask("nvmlDeviceGetEccMode"), self._ask("nvmlDeviceGetRemappedRows")
        return {
            "ecc": None if mode is None else bool(mode[0]),
            "uncorrected": self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_START),
            "waits_for_reset": None if remapped is None else bool(remapped[2]),
            "out_of_spare_rows": None if remapped is None else bool(remapped[3]),
        }


def _nvml(machine: Machine) -> str:
    return a_gpu(machine) or Gpu.of(machine).missing


@check(
    "clocks",
    symptom="the same step is slower on this GPU than on its neighbour",
    remedy="Look at cooling and power of the machine, and raise the limit again: nvidia-smi -pl WATTS.",
    needs=_nvml,
)
def clocks(machine: Machine) -> Finding:
    """Multiply for a second, and look at clock, power and temperature, and at what holds them back."""
    gpu = Gpu.of(machine)
    return judge_clocks({**gpu.under_load(), **gpu.limits()})


def judge_clocks(read: dict[str, Any]) -> Finding:
    """Return the finding for readings under load, by the names of `SYSTEM_KEYS` and `Gpu.limits`."""
    reasons = int(read.get("gpu_throttle_reasons") or 0)
    brakes = [told for bit, told in BRAKES.items() if reasons & bit]
    units = {"gpu_clock_mhz": "MHz", "gpu_power_watts": "W", "gpu_temperature": "C"}
    seen = ", ".join(f"{read[name]:.0f} {unit}" for name, unit in units.items() if name in read) or "no readings"
    limit, default = read.get("power_limit_watts"), read.get("default_power_limit_watts")
    if limit is not None and default is not None and limit < default:
        brakes.append(f"its power is limited to {limit:.0f} W of {default:.0f} W")
    if brakes:
        return warning(f"{seen} under load: {', '.join(brakes)}", **read)
    return ok(f"{seen} under load, nothing holds it back but its power", **read)


@check(
    "memory errors",
    symptom="a loss that jumps on one machine only; CUDA error: uncorrectable ECC error",
    remedy="Take the GPU out of service, or reset it (nvidia-smi -r), and train on from the last good checkpoint.",
    needs=_nvml,
)
def memory_errors(machine: Machine) -> Finding:
    """Ask NVML for memory errors that were not corrected."""
    return judge_memory(Gpu.of(machine).memory_errors())


def judge_memory(read: dict[str, Any]) -> Finding:
    """Return the finding for the readings of `Gpu.memory_errors`."""
    if read.get("uncorrected"):
        return failure(f"{read['uncorrected']} errors were not corrected since the driver started", **read)
    if read.get("out_of_spare_rows"):
        return failure("no spare rows of memory are left to replace broken ones", **read)
    if read.get("waits_for_reset"):
        return warning("a broken row of memory is replaced at the next reset", **read)
    if read.get("ecc") is False:
        remedy = "Switch it on: nvidia-smi -e 1, then reset the GPU. A bit that flips is not seen without it."
        return warning("ECC is off", remedy=remedy, **read)
    return ok("none" if read.get("ecc") else "none that NVML tells of", **read)
