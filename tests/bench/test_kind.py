from __future__ import annotations

from pathlib import Path

import pytest

from octavo_bench import results
from octavo_bench.kind import Kind, by_result, command_line, kinds

KIND = Kind(
    name="step",
    keys={"workload": str, "ms": float},
    columns=(("workload", "{workload}"), ("ms", "{ms:.1f}"), ("forecast", "{forecast:.1f}")),
    told=(("loss", "{loss:.2f}"), ("note", "{note}")),
    derived=lambda row: {"loss": row["ms"] / 10},
)


def test_a_line_of_progress_has_the_figures_that_there_are() -> None:
    assert KIND.line({"workload": "a", "ms": 12.34, "note": None}) == "a: ms 12.3, loss 1.23"
    assert KIND.line({"ms": 12.34, "note": "again"}) == "ms 12.3, loss 1.23, note again"
    assert KIND.line({"workload": "a"} | {"error": "ValueError: no", "forecast": 7}) == (
        "a: forecast 7.0, failed: ValueError: no"
    )


def test_the_table_has_no_column_of_the_line_alone() -> None:
    header, _, row = KIND.markdown([{"workload": "a", "ms": 12.34}]).splitlines()
    assert header == "| workload | ms |" and row == "| a | 12.3 |"


def test_every_command_that_measures_has_a_kind() -> None:
    found = kinds()
    assert [*found][:5] == ["demo", "control", "ladder", "portability", "step"]
    assert {"optimizer", "distributed", "scaling"} <= found.keys()
    assert all(name == kind.name for name, kind in found.items())


def test_a_table_that_shows_nothing_has_no_origin(tmp_path: Path) -> None:
    row = {"class": "malformed files", "tried": 1, "survived": 1, "silent": 0, "unclear": 0, "executed": 0, "seed": 0}
    about = {"date": "2026-01-01", "hardware": "cpu", "versions": {}, "command": "c"}
    results.write(results.Result(kind="robustness", rows=(row,), **about), tmp_path)
    assert by_result("robustness", lambda rows: "")(tmp_path) == ""
    assert "Measured on cpu" in by_result("robustness", lambda rows: f"{len(rows)} row")(tmp_path)


def test_the_command_of_ranks_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"only": ("a b", "c"), "steps": 8, "largest": True, "compile": False, "dim": None}
    command = 'octavo bench step --only "a b" --only c --steps 8 --largest'
    assert command_line("octavo bench step", **flags) == command
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command_line("octavo bench step", **flags) == f"torchrun --nproc-per-node 4 -m {command}"
