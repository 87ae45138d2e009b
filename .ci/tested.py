"""Add the versions that have just passed the tests to the doctor's list: `python .ci/tested.py`, after `make test`."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch

FILE = Path(__file__).parents[1] / "src" / "octavo" / "lab" / "doctor" / "tested.json"


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def added(tested: dict[str, list[str]], versions: dict[str, str]) -> dict[str, list[str]]:
    """Return the list with the minor versions of packages, in ascending order."""
    merged = {package: {*known, minor(versions.get(package, known[-1]))} for package, known in tested.items()}
    return {package: sorted(known, key=lambda v: [*map(int, v.split("."))]) for package, known in merged.items()}


def main() -> None:
    """Add the versions of this process, unless its PyTorch is of no release."""
    tested = json.loads(FILE.read_text(encoding="utf-8"))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if "dev" in torch.__version__ or "rc" in torch.__version__:
        return
    lines = (f'  "{package}": {json.dumps(known)}' for package, known in added(tested, versions).items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
