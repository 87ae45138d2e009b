"""A run of the demo as a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_bench import demo, results
from octavo_bench.kind import Output


def test_a_run_becomes_a_result_with_its_settings_and_log(tmp_path: Path) -> None:
    summary = {"recipe": "folded", "device": "cpu", "steps": 3, "tokens": 9, "fp8_gemms": {"reference": 1}}
    losses = {"heldout_loss_fp8": 2.0, "heldout_loss_bf16": 2.0, "gap_percent": 0.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary | losses))
    (tmp_path / "config.json").write_text('{"run": {"steps": 3}}')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: no such file"):
        demo.row_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss_fp8": 2.5}\n')
    assert demo.command(tmp_path, output=Output(write=tmp_path / "results")) == 0
    [row] = results.load(next((tmp_path / "results").glob("*-demo.json"))).rows
    history = [{"step": 1, "loss_fp8": 2.5}]
    assert row == {**summary, **losses, "config": {"run": {"steps": 3}}, "history": history}


def test_a_run_without_a_baseline_is_no_demo(tmp_path: Path) -> None:
    summary = {"recipe": "folded", "device": "cpu", "steps": 3, "tokens": 9, "heldout_loss_fp8": 2.0}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "heldout_loss_bf16": None, "gap_percent": 0.0}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="'heldout_loss_bf16' must be float, got None"):
        demo.command(tmp_path, output=Output(write=tmp_path / "results"))
