"""The table of supported versions: from the metadata of the package, and from what the result files were made with."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from octavo.kernels.runtime.devices import ARCHITECTURES
from octavo_bench.render import table

ROOT = Path(__file__).parents[2]


def support_table() -> str:
    """Return a line per kind of software and hardware: what is supported, and what results were made with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    (torch,) = (line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    measured = _versions()
    native = "; ".join(each.name for each in ARCHITECTURES if not each.refused and each.backend != "cpu")
    return table(
        ("", "supported", "tests run with", "results made with"),
        (
            (
                "Python",
                f"{pythons[0]} to {pythons[-1]}",
                f"{pythons[0]}; nightly {pythons[-1]}",
                _all(measured["python"]),
            ),
            ("PyTorch", f"{torch} and newer", f"{pinned}; nightly {torch} and the newest", _all(measured["torch"])),
            ("CUDA", "that of PyTorch's build", "none: CPU builds", _all(measured["cuda"])),
            ("Triton", "that of PyTorch's build", "its interpreter and its compiler", _all(measured["triton"])),
            ("GPU", native, "simulated devices", ", ".join(sorted(measured["gpu"]))),
            ("Operating system", "Linux", "Linux", "Linux"),
        ),
    )


def _versions() -> dict[str, set[str]]:
    """Return the versions and GPUs that result files name."""
    seen: dict[str, set[str]] = {"gpu": set()}
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, version in result["versions"].items():
            seen.setdefault(name, set()).add(version.partition("+")[0])
        if result["hardware"].startswith("nvidia-"):
            seen["gpu"].add(result["hardware"].split("-")[1].upper())
    return seen


def _all(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions, key=lambda version: [int(part) for part in version.split(".")]))
