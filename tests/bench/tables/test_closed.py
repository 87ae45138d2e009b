"""Closed studies are shown from their results, and nothing measures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo_bench import cli, results
from octavo_bench.closed import DECADE, TELEMETRY, bars, by_convolution
from octavo_bench.kind import kinds
from octavo_bench.results import Result, Row
from octavo_bench.tables import ROOT

MakeResult = Callable[..., Result]
CLOSED = [name for name, kind in kinds().items() if kind.closed]


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_study_is_rendered_from_its_results_and_has_no_command(name: str) -> None:
    assert name not in cli.COMMANDS
    text = kinds()[name].table(ROOT / "benchmarks" / "results")
    assert "| --- |" in text and "a command of that version" in text


def test_those_of_open_questions_do_not_say_so(result: MakeResult) -> None:
    assert CLOSED == ["conv", "ablation", "localize", "telemetry"]
    row = {"scheme": "bf16", "ranks": 2, "snr_db": 1.0, "ms": 1.0, "wire_bytes": 1}
    assert "of that version" not in result("reduce", row).origin


def test_telemetry_is_shown_of_every_machine_newest_first(result: MakeResult, tmp_path: Path) -> None:
    row = {"workload": "stack", "device": "cuda", "tokens": 16384, "tensors": 224, "ms": 200.0, "ms_watched": 201.0}
    row |= {"overhead_percent": 0.5, "low_percent": 0.1, "high_percent": 0.9, "own_percent": None}
    gpu = result("telemetry", row)
    older = replace(gpu, date="2026-11-20", rows=({**row, "workload": "older"},))
    cpu = replace(gpu, date="2026-11-20", hardware="cpu", rows=({**row, "own_percent": 2.5},))
    for one in (older, cpu, gpu):
        results.write(one, tmp_path)
    text = TELEMETRY.table(tmp_path)
    assert text.index("Measured on nvidia-h200") < text.index("Measured on cpu") and "older" not in text
    assert "| stack | cuda | 16,384 | 224 | 200.00 | 201.00 | +0.50 % | +0.10 to +0.90 % | 2.50 % |" in text
    assert TELEMETRY.table(tmp_path / "nothing") == ""


def test_the_figure_of_the_ablation_has_bars_by_decade() -> None:
    def row(states: str, seed: int, loss: float | None) -> Row:
        return {"states": states, "seed": seed, **({"heldout_loss": loss} if loss else {"error": "diverged"})}

    rows = [row("FP32", 0, 2.0), row("FP32", 1, 2.1), row("same", 0, 1.999), row("same", 1, 2.1), row("worse", 0, 2.1)]
    rows += [row("worse", 1, 2.2), row("broken", 0, 2.0), row("broken", 1, None)]
    same, worse, broken = bars(rows).splitlines()[2:-1]
    assert "█" not in same and "-0.0005  (-0.0010 to +0.0000)" in same
    assert worse.count("█") == 2 * DECADE and "+0.1000" in worse
    assert "diverged: 1 of 2 seeds" in broken


def test_a_convolution_has_a_ratio_per_direction_and_for_all_and_the_best_with_their_passes() -> None:
    def row(direction: str, bf16_ms: float, fp8_ms: float | None) -> Row:
        about: Row = {"shape": "3x3", "sizes": "256, 512, 7 x 7", "direction": direction, "bf16_ms": bf16_ms}
        return about | ({"error": "no plan"} if fp8_ms is None else {"fp8_ms": fp8_ms})

    passes = {"cast x": 0.25, "cast dy": 0.5, "transpose x": 0.25, "transpose dy": 0.25, "transpose w": 0.125}
    rows = [row("fprop", 1.0, 0.5) | {"passes": passes}, row("dgrad", 1.0, 0.5), row("wgrad", 2.0, 2.5)]
    all_of_them, best = 4 / (3.5 + 1.375), 4 / (0.5 + 0.25 + 1.0 + 2.0)  # fprop alone pays for its pass
    shown = f"| 3x3 | 256, 512, 7 x 7 | 4.00 | 2.00 | 2.00 | 0.80 | {all_of_them:.2f} | {best:.2f} |"
    assert shown in by_convolution(rows)
    rows[1]["is_cut"] = True  # a faster plan may exist
    assert f"| 2.00 | ≥ 2.00 | 0.80 | ≥ {all_of_them:.2f} | ≥ {best:.2f} |" in by_convolution(rows)
    assert "| 1.00 | no plan | no plan |  |  |" in by_convolution([row("fprop", 1.0, 1.0), row("dgrad", 1.0, None)])
