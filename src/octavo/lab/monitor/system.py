"""The machine of a run: power, energy, memory and load (GPU readings need nvidia-ml-py), versions and settings."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from octavo import __version__
from octavo._util.dist import in_process_group
from octavo._util.git import head_commit

_READINGS: dict[str, tuple[str, str, Callable[[Any], float], str]] = {
    "gpu_power_watts": ("PowerUsage", "", lambda x: 1e-3 * x, "power drawn by the board"),
    "gpu_energy_joules": (
        "TotalEnergyConsumption", "", lambda x: 1e-3 * x, "energy since this process began to measure",
    ),
    "gpu_temperature": ("Temperature", "NVML_TEMPERATURE_GPU", float, "temperature of the chip in degrees Celsius"),
    "gpu_clock_mhz": ("ClockInfo", "NVML_CLOCK_SM", float, "clock of the multiprocessors"),
    "gpu_throttle_reasons": ("CurrentClocksThrottleReasons", "", float, "NVML's bit mask; 0 is none"),
    "gpu_utilisation": ("UtilizationRates", "", lambda x: x.gpu / 100, "share of time with a kernel running, 0 to 1"),
    "gpu_memory_bytes": ("MemoryInfo", "", lambda x: float(x.used), "GPU memory in use by all processes"),
}  # fmt: skip
"""By key: NVML's query, its argument, the reading in its answer, and the meaning."""
SYSTEM_KEYS: dict[str, str] = {
    **{key: about for key, (*_, about) in _READINGS.items()},
    "torch_allocated_bytes": "GPU memory of this process's tensors",
    "torch_reserved_bytes": "GPU memory reserved by PyTorch for this process",
    "torch_peak_bytes": "peak GPU memory of this process's tensors",
    "process_memory_bytes": "host memory of this process",
    "load": "mean number of runnable processes over a minute",
}
"""Keys that a row of the table `system` may have, with their meaning."""


class SystemProbe:
    """Measures the machine and one GPU. `sample()` is thread-safe and takes well below 10 ms.

    Args:
        gpu: PyTorch's index of the CUDA device; None for a run on the CPU.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self.gpu = gpu
        self.missing = ""
        """Reason for missing GPU readings; empty if there are some, and on the CPU."""
        self._nvml: Any = None
        self._handle: Any = None
        if gpu is not None:
            self._open(gpu)
        self._energy_before = self.read("gpu_energy_joules") or 0.0

    def sample(self) -> dict[str, float]:
        """Return the readings that are available, keyed as `SYSTEM_KEYS`."""
        found: dict[str, float | None] = {key: self.read(key) for key in _READINGS}
        energy = found["gpu_energy_joules"]
        found["gpu_energy_joules"] = None if energy is None else energy - self._energy_before
        for name in ("allocated", "reserved", "peak") if self.gpu is not None else ():
            measure = getattr(torch.cuda, {"peak": "max_memory_allocated"}.get(name, f"memory_{name}"))
            found[f"torch_{name}_bytes"] = float(measure(self.gpu))
        found |= {"process_memory_bytes": _process_memory(), "load": _load()}
        return {key: value for key, value in found.items() if value is not None}

    def _open(self, gpu: int) -> None:
        try:
            import pynvml
        except ImportError:
            self.missing = 'power and energy are not measured: pip install "octavo[energy]"'
            return
        try:
            pynvml.nvmlInit()
            # By UUID: NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs differently.
            identity = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
            self._nvml = pynvml
        except (pynvml.NVMLError, AttributeError, RuntimeError) as error:
            self.missing = f"power and energy are not measured: {error}"

    def read(self, key: str) -> float | None:
        """Return one of NVML's readings, by its key, or None; energy is that since the driver was loaded."""
        query, argument, reading, _ = _READINGS[key]
        given = [getattr(self._nvml, argument)] if self._nvml and argument else []
        answer = self._ask(f"nvmlDeviceGet{query}", *given)
        return None if answer is None else reading(answer)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Query NVML; None without NVML or if the GPU does not support the query."""
        if self._nvml is None:
            return None
        ask: Callable[..., Any] = getattr(self._nvml, name)
        try:
            return ask(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


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


PREFIXES = ("CUDA_", "CUBLAS_", "NCCL_", "OCTAVO_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Prefixes of the environment variables stored with a run."""


def versions() -> dict[str, str | None]:
    """Return the versions that affect a run's results; None for missing packages."""
    return {
        "octavo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return the document `env` of a process with its model on `device`."""
    is_gpu = device.type == "cuda"
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine(),
        "device_type": device.type,
        "gpus": torch.cuda.device_count() if is_gpu else 0,
        "world_size": dist.get_world_size() if in_process_group() else 1,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),  # noqa: PTH119 (it may be empty)
        "commit": head_commit(Path.cwd()),
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(PREFIXES)},
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None for a missing one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
