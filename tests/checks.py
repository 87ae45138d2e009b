"""Which checks of the capabilities page ran, per machine: `pytest --record NAME` writes `tests/checked/NAME.json`.

Continuous integration records into a file that starts empty (`--record runs/checked/cpu.json`), and fails if the
committed record has a check that did not pass in it (`.ci/checked.py`).

A check is a test that the page names, or a file of them. A record has those of its machine that passed; tests that
failed or were skipped are not in it. `tests/test_capabilities.py` lets a row work only if one of its checks is.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/capabilities.md"
RECORDS = ROOT / "tests/checked"


def name_of(check: str) -> str:
    """Return the name of a check in records: its folder, file and test, so that a package may move as a whole."""
    file, _, test = check.partition("::")
    return "/".join(PurePosixPath(file).parts[-2:]) + (f"::{test.partition('[')[0]}" if test else "")


def named() -> set[str]:
    """Return the checks that the page names, without result files and pages."""
    return set(re.findall(r"`(tests/[^`\s]+\.py(?:::\w+)?)`", PAGE.read_text(encoding="utf-8")))


def passed() -> dict[str, list[str]]:
    """Return the machines whose record has a check, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted(RECORDS.glob("*.json")):
        for name in json.loads(path.read_text(encoding="utf-8"))["passed"]:
            found.setdefault(name, []).append(path.stem)
    return found


class Recorder:
    """A plugin that notes the outcomes of the named checks and writes them at the end."""

    def __init__(self, record: str) -> None:
        """Record for a machine, by its name, or into a file, by its path (.json)."""
        self.path = Path(record) if record.endswith(".json") else RECORDS / f"{record}.json"
        self.named = {name_of(check) for check in named()}
        self.outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test under its name and that of its file."""
        if report.when != "call" and report.outcome == "passed":
            return
        test = name_of(report.nodeid)
        for name in {test, test.partition("::")[0]} & self.named:
            self.outcomes.setdefault(name, set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write what passed; checks that this session did not run keep their place in the record."""
        before: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        good = {name for name, seen in self.outcomes.items() if "passed" in seen and "failed" not in seen}
        kept = {*before.get("passed", ())} - self.outcomes.keys()
        record = {"date": datetime.date.today().isoformat(), "passed": sorted((good | kept) & self.named)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
