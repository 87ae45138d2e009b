"""Closed studies: no command measures them, and their tables are the text that the last one wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_bench.closed import STUDIES, digest
from octavo_bench.kind import kinds
from octavo_bench.tables import ROOT, fill, pages

TEXT = "| gap |\n| --- |\n| 0.01 % |\n\nMeasured."


def page(text: str) -> str:
    return f"# A study\n\n<!-- closed: {digest(TEXT)} tiers -->\n{text}\n<!-- end -->\n"


def test_a_closed_table_is_kept(tmp_path: Path) -> None:
    assert fill(page(TEXT), tmp_path, "page.md") == page(TEXT)


@pytest.mark.parametrize("changed", [TEXT.replace("0.01", "0.02"), TEXT + "\n", ""])
def test_a_changed_one_is_named(changed: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"page\.md: the table 'tiers' is closed and was changed"):
        fill(page(changed), tmp_path, "page.md")


def test_no_command_measures_what_is_closed_and_its_table_names_its_results() -> None:
    assert not {study.name for study in STUDIES} & kinds().keys()
    text = "\n".join(path.read_text() for path in pages(ROOT))
    tables = re.findall(r"^<!-- closed: \S+ (\S+) -->\n(.*?)^<!-- end -->$", text, re.MULTILINE | re.DOTALL)
    results = {name: re.findall(r"`(\d\S+\.json)`", body) for name, body in tables if "registered" not in name}
    assert {study.name for study in STUDIES} <= results.keys() and all(results.values())
    named = [name for names in results.values() for name in names]
    assert [name for name in named if not (ROOT / "benchmarks/results" / name).exists()] == []
