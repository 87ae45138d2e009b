from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RunError
from octavo.train.events import Evaluated, Logged
from octavo.train.files import MetricsFile, read_metrics, write_json


def logged(step: int) -> Logged:
    return Logged(
        step=step,
        loss={"fp8": 2.02, "bf16": 2.0},
        gradient_norm={"fp8": 0.5, "bf16": 0.4},
        milliseconds={"fp8": 10.0, "bf16": 20.0},
        lr=1e-3,
        tokens=100 * step,
        tokens_per_second=1e3,
    )


def test_a_line_is_on_the_disk_as_soon_as_it_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, keep_until=0)
    metrics.report(logged(1))
    [line] = read_metrics(path)
    metrics.close()
    assert line == {
        "step": 1,
        "loss_fp8": 2.02,
        "loss_bf16": 2.0,
        "gradient_norm_fp8": 0.5,
        "gradient_norm_bf16": 0.4,
        "milliseconds_fp8": 10.0,
        "milliseconds_bf16": 20.0,
        "gap_percent": pytest.approx(1.0),
        "lr": 1e-3,
        "tokens": 100,
        "tokens_per_second": 1e3,
    }


def test_evaluations_are_lines_too(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m", keep_until=0)
    metrics.report(Evaluated(step=3, loss={"bf16": 2.0}))
    metrics.close()
    assert read_metrics(tmp_path / "m") == [{"step": 3, "heldout_loss_bf16": 2.0, "heldout_gap_percent": None}]


def test_a_resumed_run_writes_what_came_after_its_checkpoint_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, keep_until=0)
    for step in (1, 2, 3):
        first.report(logged(step))
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # the process was killed here
    second = MetricsFile(path, keep_until=2)
    second.report(logged(3))
    second.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError, match=r"summary.json: cannot be written \(No space left on device\)"):
        write_json(path, {"steps": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(path.read_text(encoding="utf-8")) == {"steps": 1}
