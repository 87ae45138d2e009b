from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.bench import results, tables
from octavo.errors import ConfigError

ROOT = Path(__file__).parents[2]


def result(kind: str, *rows: dict[str, Any]) -> results.Result:
    return results.Result(
        kind=kind,
        date="2026-11-21",
        hardware="gpu",
        versions={"torch": "2.11.0"},
        command="octavo x",
        rows=rows,
    )


def loss(recipe: str, seed: int, value: float, model: str = "124m") -> dict[str, Any]:
    return {"model": model, "tokens": 1000, "recipe": recipe, "seed": seed, "heldout_loss": value}


def test_the_committed_pages_are_current() -> None:
    assert [str(page) for page in tables.outdated(ROOT)] == []


def test_parity_states_means_gaps_and_the_spread_of_bf16() -> None:
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.02), loss("folded", 0, 2.03), loss("folded", 1, 2.05)]
    text = tables.parity(result("parity", *rows))
    assert "| bf16 | 2.0000 | 2.0200 | 2.0100 |  |" in text
    assert "| folded | 2.0300 | 2.0500 | 2.0400 | +1.49 % |" in text
    assert "2 BF16 seeds lie 0.0200 apart (1.00 %)" in text


def test_parity_keeps_models_apart_and_leaves_missing_seeds_empty() -> None:
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.2), loss("folded", 1, 2.1), loss("folded", 0, 9.0, "1b")]
    small, large = tables.parity(result("parity", *rows)).split("**1b")
    assert "| folded |  | 2.1000 | 2.1000 | +0.00 % |" in small
    assert "BF16 not measured" in large and "0 seeds" in large


def test_one_seed_of_one_recipe_stands_once() -> None:
    with pytest.raises(ConfigError, match="folded, seed 0 stands twice"):
        tables.parity(result("parity", loss("folded", 0, 2.0), loss("folded", 0, 2.1)))


def test_step_has_one_table_a_workload() -> None:
    rows = [
        {"workload": w, "implementation": i, "ms": ms, "ratio_to_bf16": r, "peak_gib": 24.7}
        for w, i, ms, r in [
            ("8 layers", "bf16", 341.0, 1.0),
            ("8 layers", "folded", 280.0, 1.2179),
            ("1", "x", 1, 1),
        ]
    ]
    text = tables.step(result("step", *rows))
    assert text.count("| implementation |") == 2
    assert "| folded | 280.0 | 1.22 | 24.7 |" in text


def test_demo_shows_both_losses_and_the_gap() -> None:
    row = {
        "recipe": "folded",
        "device": "cpu",
        "steps": 300,
        "tokens": 614400,
        "heldout_loss_fp8": 1.61,
        "heldout_loss_bf16": 1.6,
        "gap_percent": 0.625,
    }
    line = "| cpu | folded | 300 | 614,400 | 1.6100 | 1.6000 | +0.62 % |"
    assert f"{line}  |" in tables.demo(result("demo", row))
    assert f"{line} 3.2000 |" in tables.demo(result("demo", {**row, "unigram_entropy": 3.2}))


def test_a_measured_table_says_where_its_figures_come_from(tmp_path: Path) -> None:
    results.write(result("parity", loss("bf16", 0, 2.0)), tmp_path)
    text = tables.render("parity", tmp_path)
    assert "Measured on gpu (torch 2.11.0) with `octavo x`: `2026-11-21-gpu-parity.json`." in text


def test_what_was_never_measured_says_so(tmp_path: Path) -> None:
    page = "a\n<!-- table: step -->\nold figure\n<!-- end -->\nb\n"
    filled = tables.fill(page, tmp_path, "page.md")
    assert filled == f"a\n<!-- table: step -->\n{tables.NOT_MEASURED}\n<!-- end -->\nb\n"
    assert tables.fill(filled, tmp_path, "page.md") == filled


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
        tables.fill(page, tmp_path, "page.md")


def test_check_reports_a_stale_page_and_writing_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- table: step -->\nstale\n<!-- end -->\n")
    at_root = ["--root", str(tmp_path)]
    assert tables.main(["--check", *at_root]) == 1
    assert "stale" in page.read_text() and "not current" in capsys.readouterr().out
    assert tables.main(at_root) == 0
    assert tables.main(["--check", *at_root]) == 0


def test_an_invalid_result_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latest = tmp_path / "benchmarks" / "results" / "latest"
    latest.mkdir(parents=True)
    (latest / "step.json").write_text("{}")
    (tmp_path / "README.md").write_text("<!-- table: step -->\n<!-- end -->\n")
    assert tables.main(["--root", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "step.json" in error and error.count("\n") == 1
