"""Checks of the hardware: a GPU's clocks and memory errors (where NVML answers), shared memory, disk, open files."""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from octavo.lab.doctor.check import Finding, check, failure, ok, skipped, warning
from octavo.lab.doctor.subjects import Machine, a_gpu
from octavo.lab.monitor.system import SystemProbe

LOAD_SECONDS = 1.0
_UNCORRECTED, _SINCE_START, _OF_MULTIPROCESSORS = 1, 0, 1
"""NVML constants."""
_NVLINK_1, _NVLINK_5, _BLACKWELL = 1, 7, 10
"""NVML's numbers of these versions of NVLink (versions 3 and 4 are 4 to 6), and a major compute capability."""
_MOST_LINKS = 18
"""NVLinks of a GPU: as many as any has."""
BRAKES = {
    0x08: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake of the supply",
}
"""NVML's throttle reasons, by bit. Usual ones, such as the power cap, are left out."""


class Gpu(SystemProbe):
    """NVML's readings of one GPU; None for those it does not have."""

    @classmethod
    def of(cls, machine: Machine) -> Gpu:
        """Return the GPU of a machine."""
        return cls(machine.device.index or 0)

    def under_load(self) -> dict[str, float]:
        """Run matrix multiplications for a second; return `SystemProbe.sample` near the end."""
        x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=torch.device("cuda", self.gpu or 0))
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            for _ in range(20):
                x @ x
            sample = self.sample()
            torch.cuda.synchronize()
        return sample

    def limits(self) -> dict[str, float | None]:
        """Return the current and default power limits in watts, and the maximum clock in MHz."""
        power = "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementDefaultLimit"
        limit, default = (self._ask(name) for name in power)
        return {
            "power_limit_watts": None if limit is None else limit / 1e3,
            "default_power_limit_watts": None if default is None else default / 1e3,
            "highest_clock_mhz": self._ask("nvmlDeviceGetMaxClockInfo", _OF_MULTIPROCESSORS),
        }

    def link_gb_per_s(self) -> float | None:
        """Return the nominal bandwidth of this GPU's links, GB/s in one direction: NVLink if it is up, else PCIe.

        An NVLink has 20 GB/s in version 1, 25 up to version 4, 50 from version 5 on. None without NVML.
        """
        up = [self._ask("nvmlDeviceGetNvLinkVersion", link) for link in range(_MOST_LINKS)
              if self._ask("nvmlDeviceGetNvLinkState", link) == 1]  # fmt: skip
        capability = self._ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
        newest = 50.0 if capability[0] >= _BLACKWELL else 25.0  # some drivers answer version 5 for a Hopper
        if rates := [20.0 if each == _NVLINK_1 else newest if each >= _NVLINK_5 else 25.0 for each in up if each]:
            return sum(rates)
        lanes, generation = (self._ask(f"nvmlDeviceGetMaxPcieLink{what}") for what in ("Width", "Generation"))
        return None if not lanes or not generation else lanes * 0.985 * 2.0 ** (generation - 3)

    def memory_errors(self) -> dict[str, Any]:
        """Return the state of ECC, uncorrected errors since the driver started, and row remapping."""
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
    symptom="the same step is slower on this GPU than on others",
    remedy="Check the machine's cooling and power, and restore the power limit: nvidia-smi -pl WATTS.",
    needs=_nvml,
    read=lambda machine: Gpu.of(machine).under_load() | Gpu.of(machine).limits(),
)
def clocks(read: dict[str, Any]) -> Finding:
    """Judge clock, power, temperature and throttle reasons after a second of load: `SYSTEM_KEYS` and `Gpu.limits`."""
    reasons = int(read.get("gpu_throttle_reasons") or 0)
    brakes = [reason for bit, reason in BRAKES.items() if reasons & bit]
    units = {"gpu_clock_mhz": "MHz", "gpu_power_watts": "W", "gpu_temperature": "C"}
    seen = ", ".join(f"{read[name]:.0f} {unit}" for name, unit in units.items() if name in read) or "no readings"
    limit, default = read.get("power_limit_watts"), read.get("default_power_limit_watts")
    if limit is not None and default is not None and limit < default:
        brakes.append(f"power limited to {limit:.0f} W of {default:.0f} W")
    if brakes:
        return warning(f"{seen} under load: {', '.join(brakes)}", **read)
    return ok(f"{seen} under load, limited by its power cap only", **read)


@check(
    "memory errors",
    symptom="the loss jumps on one machine only; CUDA error: uncorrectable ECC error",
    remedy="Take the GPU out of service, or reset it (nvidia-smi -r), and resume from the last good checkpoint.",
    needs=_nvml,
    read=lambda machine: Gpu.of(machine).memory_errors(),
)
def memory_errors(read: dict[str, Any]) -> Finding:
    """Judge NVML's readings of uncorrected memory errors (`Gpu.memory_errors`)."""
    if read.get("uncorrected"):
        return failure(f"{read['uncorrected']} uncorrected errors since the driver started", **read)
    if read.get("out_of_spare_rows"):
        return failure("no spare memory rows left to remap faulty ones", **read)
    if read.get("waits_for_reset"):
        return warning("a faulty memory row will be remapped at the next reset", **read)
    if read.get("ecc") is False:
        remedy = "Enable it: nvidia-smi -e 1, then reset the GPU. Bit flips go undetected without it."
        return warning("ECC is off", remedy=remedy, **read)
    return ok("none" if read.get("ecc") else "none reported by NVML", **read)


GIB = 2**30
SHARED_GIB = 1.0
"""Minimum for NCCL and data-loading workers. Containers often have 64 MiB."""
DISK_GIB = (1.0, 10.0)
"""Free space below which writing a run fails, and below which it may fail."""
FILES = 1024
"""Open files that suffice for a run on eight GPUs."""


@check(
    "shared memory",
    symptom="'Bus error', or NCCL says 'unhandled system error', in a container",
    remedy="Give the container more: docker run --shm-size=8g, or --ipc=host.",
    read=lambda _: shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").exists() else None,
)
def shared_memory(total: float | None) -> Finding:
    """Judge the size of /dev/shm in GiB; None without it."""
    if total is None:
        return skipped("there is no /dev/shm")
    found = warning if total < SHARED_GIB else ok
    return found(f"/dev/shm has {total:.2f} GiB", total_gib=total)


def _free_space(machine: Machine) -> float:
    folder = next(path for path in (machine.folder.absolute(), *machine.folder.absolute().parents) if path.exists())
    return shutil.disk_usage(folder).free / GIB


@check(
    "disk",
    symptom="a run stops while writing a checkpoint",
    remedy="Free disk space, or write runs elsewhere: --out DIR.",
    read=_free_space,
)
def disk(free: float) -> Finding:
    """Judge the free space, in GiB, where runs are written."""
    found = failure if free < DISK_GIB[0] else warning if free < DISK_GIB[1] else ok
    return found(f"{free:.1f} GiB free where runs are written", free_gib=free)


@check(
    "open files",
    symptom="'Too many open files' on several GPUs",
    remedy=f"Raise the limit first: ulimit -n {16 * FILES}.",
    read=lambda _: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
)
def open_files(limit: int) -> Finding:
    """Judge how many files a process may open; -1 for no limit."""
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    return (warning if limit < FILES else ok)(f"a process may open {limit}", limit=limit)
