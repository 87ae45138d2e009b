"""The GPU's driver: is there a GPU that PyTorch cannot use, and does it answer?"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from octavo.doctor.check import Finding, check, failure, ok, skipped
from octavo.doctor.subjects import Machine

_DRIVER = Path("/proc/driver/nvidia/version")


@check(
    "driver",
    symptom="a run is on the CPU although there is a GPU; CUDA errors at random places",
    remedy="Install a driver that is new enough for the CUDA version of PyTorch, or a PyTorch for the driver's.",
)
def driver(machine: Machine) -> Finding:
    """Compare what the system says of its driver with what PyTorch can do, and let the GPU add up a few numbers."""
    found = _driver_version(_DRIVER)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    complaint = " ".join(str(heard[-1].message).split()) if heard else ""
    finding = judge(found, torch.version.cuda, available, machine.environ.get("CUDA_VISIBLE_DEVICES"), complaint)
    if finding is not None:
        return finding
    if machine.device.type != "cuda":
        return skipped("this is a CPU")
    total = float(torch.arange(1000.0, device=machine.device).sum())
    if total != 499_500:
        return failure(f"the GPU adds 0 to 999 up to {total:g}", remedy="The GPU is broken: take another one.")
    return ok(f"driver {found or 'unknown'}, PyTorch for CUDA {torch.version.cuda}", driver=found)


def judge(
    driver: str | None, built_for: str | None, available: bool, visible: str | None, complaint: str
) -> Finding | None:
    """Return why a GPU that is there cannot be used, or None.

    Args:
        driver: version of NVIDIA's kernel driver; None where there is none.
        built_for: the CUDA version that PyTorch was built for; None for a build without CUDA.
        available: whether PyTorch can use a GPU.
        visible: CUDA_VISIBLE_DEVICES.
        complaint: what PyTorch warned of when it was asked.
    """
    if driver is None or available:
        return None
    if visible in ("", "-1"):
        remedy = "Unset CUDA_VISIBLE_DEVICES to use the GPU; leave it where the CPU was meant."
        return failure(f"CUDA_VISIBLE_DEVICES='{visible}' hides every GPU", remedy=remedy, driver=driver)
    if built_for is None:
        remedy = "Install a PyTorch that was built for CUDA: https://pytorch.org has the commands."
        return failure(f"there is a GPU (driver {driver}), and this PyTorch is for CPUs only", remedy=remedy)
    why = f": {complaint}" if complaint else ""
    return failure(f"PyTorch for CUDA {built_for} cannot use the GPU of driver {driver}{why}", driver=driver)


def _driver_version(path: Path) -> str | None:
    if not path.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text(encoding="utf-8", errors="replace"))
    return found[0] if found else "unknown"
