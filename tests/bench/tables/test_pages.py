from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_bench.tables import NOT_MEASURED, bring_up_to_date, fill, outdated

ROOT = Path(__file__).parents[3]


def test_the_committed_pages_are_current() -> None:
    assert [str(page) for page in outdated(ROOT)] == []


def test_what_was_never_measured_says_so(tmp_path: Path) -> None:
    page = "a\n<!-- table: step -->\nold figure\n<!-- end -->\nb\n"
    filled = fill(page, tmp_path, "page.md")
    assert filled == f"a\n<!-- table: step -->\n{NOT_MEASURED}\n<!-- end -->\nb\n"
    assert fill(filled, tmp_path, "page.md") == filled


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: stepp -->\n<!-- end -->\n", "Did you mean 'step'"),
        ("<!-- table: step -->\n", "'step' has no `<!-- end -->`"),
        ("x\n<!-- end -->\n", "page.md:2: .* never began"),
        ("<!-- table: step -->\n<!-- table: parity -->\n<!-- end -->\n", "'step' has no end before"),
    ],
)
def test_a_broken_page_is_named(page: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(page, tmp_path, "page.md")


def test_check_reports_a_stale_page_and_writing_mends_it(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: step -->\nstale\n<!-- end -->\n")
    (line,) = bring_up_to_date(tmp_path, check=True)
    assert "stale" in page.read_text() and "not current" in line
    assert bring_up_to_date(tmp_path, check=False) == [f"{page}: written"]
    assert bring_up_to_date(tmp_path, check=True) == []


def test_what_the_package_quotes_is_written_with_the_pages(tmp_path: Path) -> None:
    quoted = tmp_path / "src" / "octavo" / "lab" / "train" / "presets" / "studies.json"
    quoted.parent.mkdir(parents=True)
    quoted.write_text('{"folded": {}}\n')
    assert bring_up_to_date(tmp_path, check=False) == [f"{quoted}: written"]
    assert quoted.read_text() == "{}\n"  # no study was measured there


def test_an_invalid_result_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "benchmarks" / "results"
    directory.mkdir(parents=True)
    (directory / "2026-11-21-gpu-step.json").write_text("{}")
    (tmp_path / "README.md").write_text("<!-- table: step -->\n<!-- end -->\n")
    with pytest.raises(ConfigError, match=r"step\.json"):
        bring_up_to_date(tmp_path, check=True)
