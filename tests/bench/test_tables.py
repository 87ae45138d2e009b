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
    assert "| bf16 | 2.0000 | 2.0200 | 2.0100 |  |  |" in text
    # Gaps of 1.5 % and 1.485149 %: mean 1.492574, spread 0.010502, 12.706 standard errors of 0.007426.
    assert "| folded | 2.0300 | 2.0500 | 2.0400 | +1.49 % | ± 0.09 % |" in text
    assert "2 BF16 seeds lie 0.0200 apart (1.00 %)" in text and "12.7 standard errors with 2 seeds" in text
    assert "tokens to equal loss" not in text and "over sequences" not in text


def test_parity_shows_evidence_where_there_is_some() -> None:
    evidence = {"gap": 0.02, "gap_95": 0.01, "tokens_ratio": 1.02, "loss_matched_speedup": 1.234}
    evidence |= {"cosine_start": 0.99, "cosine_layer_start": 0.9, "cosine_end": 0.95, "cosine_layer_end": 0.8}
    more = {**evidence, "gap_95": 0.03, "tokens_ratio": 1.04}
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.0)]
    rows += [loss("folded", 0, 2.0) | evidence, loss("folded", 1, 2.0) | more, loss("block", 0, 2.0)]
    text = tables.parity(result("parity", *rows))
    assert "| 95 % over sequences | tokens to equal loss | speed at equal loss | gradient cosine, start |" in text
    assert "| +0.00 % | ± 0.00 % | ± 1.000 % | 1.030 | 1.23 | 0.9900 | 0.9000 | 0.9500 | 0.8000 |" in text
    assert "| block | 2.0000 |  | 2.0000 | +0.00 % |  |  |  |  |  |  |  |  |" in text
    assert "whether these very weights differ" in text and "ended higher" in text


def test_parity_keeps_models_apart_and_leaves_missing_seeds_empty() -> None:
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.2), loss("folded", 1, 2.1), loss("folded", 0, 9.0, "1b")]
    small, large = tables.parity(result("parity", *rows)).split("**1b")
    assert "| folded |  | 2.1000 | 2.1000 | -4.55 % |  |" in small  # to BF16 of the same seed
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


SHAPE = {"dim": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "layers": 2, "batch": 2, "sequence": 1024}


def timed(implementation: str, ms: float, **more: Any) -> dict[str, Any]:
    row = {"workload": "w", "implementation": implementation, "ms": ms, "ratio_to_bf16": 100 / ms, "peak_gib": 2.0}
    return {**row, "gemm_ms": ms / 2, "attention_ms": 10.0, "elementwise_ms": 20.0, "idle_ms": 1.0} | more


def test_step_says_where_time_goes_and_what_was_possible() -> None:
    rates = {"copy_gb_per_s": 4170.4, "tflops": {"bf16": 668.2, "row slow": 1154.6}}
    rows = [
        timed("bf16", 100.0, rates=rates, drift=-0.012, shape=SHAPE, fraction_of_floor=0.9),
        timed("torchao tensorwise", 80.0),
        timed("octavo folded", 64.0, fraction_of_floor=0.755),
        {"workload": "w", "implementation": "octavo block", "error": "OutOfMemoryError: full"},
    ]
    text = tables.step(result("step", *rows))
    header, _, bf16, torchao, folded, block = (line for line in text.splitlines() if line.startswith("|"))
    assert "| times torchao tensorwise | GEMM ms |" in header and "optimizer" not in header
    assert bf16.endswith("| 100.0 | 1.00 | 0.80 | 50.0 | 10.0 | 20.0 | 1.0 | 2.0 | 0.90 |")
    assert torchao.endswith("| 80.0 | 1.25 | 1.00 | 40.0 | 10.0 | 20.0 | 1.0 | 2.0 |  |")
    assert folded.endswith("| 64.0 | 1.56 | 1.25 | 32.0 | 10.0 | 20.0 | 1.0 | 2.0 | 0.76 |")
    assert block.startswith("| octavo block | failed: OutOfMemoryError: full |  |")
    assert "**w**: 2 layers, dim 128, ffn 256, 4 heads, 2 KV heads, no head, 2 x 1,024 tokens" in text
    assert "copy 4,170 GB/s; GEMM TFLOP/s: bf16 668, row slow 1,155." in text
    assert "timed again at the end: -1.2 % of its time" in text


def test_the_summary_of_a_step_has_no_parts() -> None:
    text = tables.step_summary(result("step", timed("bf16", 100.0, drift=0.1), timed("octavo folded", 64.0)))
    assert "| implementation | ms | times BF16's speed | peak GiB |" in text
    assert "| octavo folded | 64.0 | 1.56 | 2.0 |" in text and "again" not in text


def test_gemm_has_a_line_a_shape_and_a_column_a_kernel() -> None:
    def row(shape: str, kernel: str, operands: str, accumulate: str, **figures: Any) -> dict[str, Any]:
        return {"shape": shape, "kernel": kernel, "operands": operands, "accumulate": accumulate, **figures}

    rows = [
        row("8x16x32", "bf16", "bf16", "slow", tflops=668.4, ratio_to_bf16=1.0),
        row("8x16x32", "scaled_mm.row", "row", "fast", tflops=1290.4, ratio_to_bf16=1.9311),
        row("8x8x8", "bf16", "bf16", "slow", tflops=600.0, ratio_to_bf16=1.0),
        row("8x8x8", "new", "1x128 x 1x128", "slow", error="ValueError: no"),
    ]
    lines = tables.gemm(result("gemm", *rows)).splitlines()
    assert lines[0] == "| M x N x K | BF16 | row, fast: `scaled_mm.row` | 1x128 x 1x128, slow: `new` |"
    assert lines[2:] == ["| 8 x 16 x 32 | 668 | 1,290 (1.93) |  |", "| 8 x 8 x 8 | 600 |  | failed: ValueError: no |"]


def test_kernels_are_beside_a_copy() -> None:
    figures = {"ms": 0.0561, "bytes": 1, "passes": 2, "gb_per_s": 3610.2, "ratio_to_copy": 0.866}
    rows = [
        {"kernel": "transpose", "shape": "8 x 8", **figures},
        {"kernel": "rotary", "shape": "8 x 8", "error": "ValueError: no"},
    ]
    lines = tables.kernels(result("kernels", *rows)).splitlines()
    assert lines[0] == "| kernel | shape | ms | passes | GB/s | of a copy's |"
    assert lines[2:] == [
        "| transpose | 8 x 8 | 0.056 | 2 | 3,610 | 0.87 |",
        "| rotary | 8 x 8 | failed: ValueError: no |  |  |  |",
    ]


@pytest.mark.parametrize("name", tables.MEASURED)
def test_every_table_of_measurements_renders_or_says_it_is_missing(name: str, tmp_path: Path) -> None:
    assert tables.render(name, tmp_path) == tables.NOT_MEASURED
    assert tables.render(name, ROOT / "benchmarks" / "results")


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
