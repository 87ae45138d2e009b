"""Pairs of BF16 runs: what the package quotes is what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.lab.train import control as packaged
from octavo.lab.train.config import assemble, load_preset
from octavo_bench import control
from octavo_bench.results import newest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_package_quotes_the_newest_result() -> None:
    measured = control.by_preset([row for result in newest("control", RESULTS) for row in result.rows])
    assert packaged.controls() == measured


def test_a_pair_is_equal_up_to_its_fork_and_differs_by_rounding_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = {"recipe": "bf16", "baseline": False, "steps": 4, "bf16_first_steps": 2, "eval_tokens": 256, "device": "cpu"}
    own = {"model": {"layers": 1}, "run": run, "data": {"cache": str(tmp_path)}}
    config = assemble(load_preset("tiny", cuda=False), ("test", own))
    row = control.pair(config)
    assert row["fork"] == 2 and row["heldout_loss"] > 1 and 0 < abs(row["gap_percent"]) < 0.1
    monkeypatch.setattr(control, "move", lambda weights, generator: None)
    assert control.pair(config)["gap_percent"] == 0
