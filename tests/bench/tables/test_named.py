from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo_bench import readme, results
from octavo_bench.results import Result
from octavo_bench.tables import NOT_MEASURED, render, tables

ROOT = Path(__file__).parents[3]
MakeResult = Callable[..., Result]


@pytest.mark.parametrize("name", sorted(tables().keys() - readme.TABLES.keys()))
def test_every_table_of_measurements_renders_or_says_it_is_missing(name: str, tmp_path: Path) -> None:
    assert render(name, tmp_path) == NOT_MEASURED
    assert render(name, ROOT / "benchmarks" / "results")


def test_a_measured_table_says_where_its_figures_come_from(result: MakeResult, tmp_path: Path) -> None:
    row = {"workload": "124m", "implementation": "bf16", "ms": 2.0, "ratio_to_bf16": 1.0}
    results.write(result("moe", row), tmp_path)
    text = render("moe", tmp_path)
    assert "Measured on nvidia-h200 (torch 2.11.0) with `octavo x`: `2026-11-21-nvidia-h200-moe.json`." in text
