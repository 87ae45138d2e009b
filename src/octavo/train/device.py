"""Which device a run uses, and what it is called."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.monitor.system import versions

__all__ = ["describe", "resolve", "versions"]


def resolve(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first CUDA device where there is one, else the CPU.

    Raises:
        ConfigError: an unknown name, or a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"run.device: '{name}' is none of auto, cpu, cuda, cuda:INDEX.")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"run.device: no CUDA device is available to torch {torch.__version__}; use --device cpu.")
    if int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"run.device: '{name}' is not there; CUDA devices: {torch.cuda.device_count()}.")
    return torch.device("cuda", int(index or 0))


def describe(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor and its number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """Linux has the model in /proc/cpuinfo; elsewhere Python's guess will do."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
