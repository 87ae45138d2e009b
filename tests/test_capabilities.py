"""The page of capabilities: every number once, every test and file that it names is there, its counts are right."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/capabilities.md"
LEFT_OUT = {2, 41, 43, 65, 78, 103, 106, 162}


class Capability(NamedTuple):
    numbers: range
    state: str
    checks: list[str]


def capabilities() -> list[Capability]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+)(?:-(\d+))? \|.*\| (works|otherwise|open) \| (.*) \|$", line):
            first, last = int(row[1]), int(row[2] or row[1])
            found.append(Capability(range(first, last + 1), row[3], re.findall(r"`([^`]+)`", row[4])))
    return found


ROWS = capabilities()


def test_every_number_is_there_once() -> None:
    numbers = [number for row in ROWS for number in row.numbers]
    assert sorted([*numbers, *LEFT_OUT]) == list(range(1, 172))


def test_the_counts_are_those_of_the_rows() -> None:
    counts = Counter({"works": 0, "otherwise": 0, "open": 0})
    for row in ROWS:
        counts[row.state] += len(row.numbers)
    said = f"{counts['works']} work. Done otherwise: {counts['otherwise']}. Open: {counts['open']}."
    assert f"Of {counts.total()}: {said}" in PAGE.read_text(encoding="utf-8")


def test_what_checks_them_is_there() -> None:
    assert [row.numbers for row in ROWS if not row.checks and row.state != "open"] == [], "nothing checks them"
    for state, check in [(row.state, check) for row in ROWS for check in row.checks]:
        file, _, test = check.partition("::")
        assert (ROOT / file).is_file(), check
        kinds = ("docs/",) if state == "otherwise" else ("tests/", "benchmarks/results/")
        assert file.startswith((*kinds, "tests/")), f"{check} is no check of something that is '{state}'"
        if file.endswith(".py"):
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {test or 'test_'}", text, re.M), check
            assert not test or re.search(rf"^def {test}\(", text, re.M), check
