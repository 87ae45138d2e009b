"""The matrix of features of the page on rotated INT8: its tests are there and run, and its messages are the code's."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from test_capabilities import never_runs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/rotated-int8.md"


def rows() -> list[tuple[str, str, list[str]]]:
    """Return feature, cell and tests of each row."""
    matrix = PAGE.read_text("utf-8").partition("## What it goes with")[2].partition("\n**")[0]
    cells = [re.split(r" \| ", line.strip("| ")) for line in matrix.splitlines() if line.startswith("|")][2:]
    return [(feature, cell, re.findall(r"`([^`]+)`", tests)) for feature, cell, tests in cells]


@cache
def messages() -> str:
    """Return all strings of the package, in one."""
    trees = (ast.parse(file.read_text("utf-8")) for file in (ROOT / "src").rglob("*.py"))
    return "\n".join(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@pytest.mark.parametrize(("feature", "cell", "tests"), rows(), ids=lambda part: str(part)[:24])
def test_each_cell_has_tests_that_run_and_a_refusal_its_message(feature: str, cell: str, tests: list[str]) -> None:
    assert tests, feature
    for check in tests:
        file, _, test = check.partition("::")
        assert test and never_runs((ROOT / "tests" / file).read_text("utf-8"), test) == "", check
    said = re.findall(r"'([^']+)'", cell)
    assert bool(said) == ("refused" in cell), "a refusal is quoted"
    for part in (part for message in said for part in re.split(r"\d+", message) if part.strip()):
        assert part in messages(), part
