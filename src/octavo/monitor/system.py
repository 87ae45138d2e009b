"""What the machine is doing: power, energy, memory and load, by NVML where the package nvidia-ml-py is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SAMPLES: dict[str, tuple[str, float, str]] = {
    "gpu_power_watts": ("nvmlDeviceGetPowerUsage", 1e-3, "power drawn by the board"),
    "gpu_energy_joules": ("nvmlDeviceGetTotalEnergyConsumption", 1e-3, "energy since this process began to watch"),
    "gpu_temperature": ("nvmlDeviceGetTemperature", 1.0, "of the chip, in degrees Celsius"),
    "gpu_clock_mhz": ("nvmlDeviceGetClockInfo", 1.0, "clock of the multiprocessors"),
    "gpu_throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", 1.0, "NVML's bits; 0 is none"),
}
_ARGUMENTS = {"gpu_temperature": "NVML_TEMPERATURE_GPU", "gpu_clock_mhz": "NVML_CLOCK_SM"}
SYSTEM_KEYS: dict[str, str] = {
    **{key: about for key, (_, _, about) in _SAMPLES.items()},
    "gpu_utilisation": "share of the time in which a kernel ran, 0 to 1",
    "gpu_memory_bytes": "memory in use on the GPU, by all processes",
    "torch_allocated_bytes": "memory of the tensors of this process",
    "torch_reserved_bytes": "memory that PyTorch holds for this process",
    "torch_peak_bytes": "the most that its tensors took so far",
    "process_memory_bytes": "main memory of this process",
    "load": "mean number of runnable processes over a minute",
}
"""What a row of the table `system` may hold."""


class SystemProbe:
    """Measures the machine and one GPU. `sample()` may be called in any thread; it takes well below 10 ms.

    Args:
        gpu: index of the CUDA device, as PyTorch counts; None for a run on the CPU.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self.gpu = gpu
        self.missing = ""
        """Why there are no readings of the GPU's own; empty where there are, and for a run on the CPU."""
        self._nvml: Any = None
        self._handle: Any = None
        if gpu is not None:
            self._open(gpu)
        self._energy_before = self._read("gpu_energy_joules") or 0.0

    def sample(self) -> dict[str, float]:
        """Return what could be measured, by the names of `SYSTEM_KEYS`."""
        found: dict[str, float | None] = {key: self._read(key) for key in _SAMPLES}
        energy = found["gpu_energy_joules"]
        found["gpu_energy_joules"] = None if energy is None else energy - self._energy_before
        found |= self._usage()
        found |= _torch_memory(self.gpu)
        found |= {"process_memory_bytes": _process_memory(), "load": _load()}
        return {key: value for key, value in found.items() if value is not None}

    def _open(self, gpu: int) -> None:
        try:
            import pynvml
            import torch
        except ImportError:
            self.missing = "power and energy are not measured: pip install octavo[energy]"
            return
        try:
            pynvml.nvmlInit()
            # By its identity: NVML does not know of CUDA_VISIBLE_DEVICES and counts otherwise.
            identity = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self._nvml = pynvml
        except (pynvml.NVMLError, AttributeError, RuntimeError) as error:
            self.missing = f"power and energy are not measured: {error}"

    def _read(self, key: str) -> float | None:
        name, unit, _ = _SAMPLES[key]
        extra = [getattr(self._nvml, _ARGUMENTS[key])] if self._nvml and key in _ARGUMENTS else []
        value = self._ask(name, *extra)
        return None if value is None else unit * float(value)

    def _usage(self) -> dict[str, float | None]:
        rates, memory = self._ask("nvmlDeviceGetUtilizationRates"), self._ask("nvmlDeviceGetMemoryInfo")
        return {
            "gpu_utilisation": None if rates is None else rates.gpu / 100,
            "gpu_memory_bytes": None if memory is None else float(memory.used),
        }

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return what NVML says; None where there is none or this GPU cannot tell."""
        if self._nvml is None:
            return None
        ask: Callable[..., Any] = getattr(self._nvml, name)
        try:
            return ask(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def _torch_memory(gpu: int | None) -> dict[str, float]:
    if gpu is None:
        return {}
    import torch

    return {
        "torch_allocated_bytes": float(torch.cuda.memory_allocated(gpu)),
        "torch_reserved_bytes": float(torch.cuda.memory_reserved(gpu)),
        "torch_peak_bytes": float(torch.cuda.max_memory_allocated(gpu)),
    }


def _process_memory() -> float | None:
    if sys.platform != "linux":
        return None
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
