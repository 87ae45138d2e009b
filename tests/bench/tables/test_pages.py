from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.tables.named import NOT_MEASURED
from octavo.bench.tables.pages import fill, main, outdated
from octavo.errors import ConfigError

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


def test_check_reports_a_stale_page_and_writing_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: step -->\nstale\n<!-- end -->\n")
    at_root = ["--root", str(tmp_path)]
    assert main(["--check", *at_root]) == 1
    assert "stale" in page.read_text() and "not current" in capsys.readouterr().out
    assert main(at_root) == 0
    assert main(["--check", *at_root]) == 0


def test_an_invalid_result_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latest = tmp_path / "benchmarks" / "results" / "latest"
    latest.mkdir(parents=True)
    (latest / "step.json").write_text("{}")
    (tmp_path / "README.md").write_text("<!-- table: step -->\n<!-- end -->\n")
    assert main(["--root", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "step.json" in error and error.count("\n") == 1
