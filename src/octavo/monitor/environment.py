"""What decides a run's numbers and its speed beside its configuration: versions, device, settings of libraries."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from octavo import __version__
from octavo.ranks import in_process_group

PREFIXES = ("CUDA_", "CUBLAS_", "NCCL_", "OCTAVO_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Variables of the environment whose names begin so are kept with a run."""


def versions() -> dict[str, str | None]:
    """Return the versions that decide what a run computes; None for what is not there."""
    return {
        "octavo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the table `env` holds of a process whose model is on `device`."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "device": _name(device),
        "device_type": device.type,
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
        "world_size": dist.get_world_size() if in_process_group() else 1,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith(PREFIXES)},
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
