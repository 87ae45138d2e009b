"""The table that says which recipe is the default follows the figures, whichever way they fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo_bench import results
from octavo_bench.choice import DEFAULT, choice


def write(directory: Path, kind: str, *rows: dict[str, Any]) -> None:
    head = {"date": "2026-11-21", "hardware": "nvidia-h200", "versions": {"torch": "2.11.0"}, "command": "octavo"}
    results.write(results.Result(kind=kind, rows=rows, **head), directory)


def trained(recipe: str, seed: int, loss: float, model: str = "llama-350m", ms: float = 500.0) -> dict[str, Any]:
    run = {"model": model, "tokens": 1000, "step_ms": ms}
    return {**run, "recipe": recipe, "seed": seed, "heldout_loss": loss}


def timed(implementation: str, ratio: float, workload: str = "llama-8b-stack") -> dict[str, Any]:
    return {"workload": workload, "implementation": implementation, "ms": 1.0, "ratio_to_bf16": ratio, "peak_gib": 9.0}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "parity",
        *(trained("bf16", seed, loss, "llama-1m", 5.0) for seed, loss in enumerate((9.0, 1.0))),
        trained("bf16", 0, 1.00),
        trained("bf16", 1, 1.02),
        trained("folded", 0, 1.001),
        trained("folded", 1, 1.021),
        trained("delayed", 0, 1.05),
    )
    write(
        tmp_path,
        "step",
        timed("octavo folded", 1.4),
        timed("octavo delayed", 1.5),
        timed("octavo folded", 9.9, "tiny"),
    )
    return tmp_path


def test_the_largest_model_decides_who_is_inside_the_spread(directory: Path) -> None:
    text = choice(directory)
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()[2:4]
    }
    assert rows["`folded`"][:4] == ["+0.10 %", "yes", "1.40", "9.0"]
    assert rows["`delayed`"][:3] == ["+5.00 %", "no", "1.50"]
    assert "llama-350m, 1,000 tokens; 2 BF16 seeds lie 1.98 % apart. Inside that spread: `folded`." in text
    assert "The fastest of them is `folded`." in text


def test_a_default_outside_the_spread_is_said(tmp_path: Path) -> None:
    write(tmp_path, "parity", trained("bf16", 0, 1.0), trained("bf16", 1, 1.001), trained(DEFAULT, 0, 1.1))
    assert f"Inside that spread: none. The default, `{DEFAULT}`, is outside." in choice(tmp_path)


def test_stress_shows_the_noisiest_product(directory: Path) -> None:
    case = {"recipe": "folded", "nonfinite": 0}
    write(
        directory,
        "stress",
        {**case, "case": "a", "y_median_db": 30.0, "dw_median_db": 20.0, "dw_worst_db": 1.0},
        {**case, "case": "b", "y_median_db": 25.0},
    )
    assert "| 20.0 dB |" in choice(directory)


def test_one_seed_of_bf16_decides_nothing(tmp_path: Path) -> None:
    assert choice(tmp_path) == ""
    write(tmp_path, "parity", trained("bf16", 0, 1.0), trained("folded", 0, 1.0))
    assert choice(tmp_path) == ""
