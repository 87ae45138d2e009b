from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RunError
from octavo.lab.train.events import Evaluated, Logged
from octavo.lab.train.files import MetricsFile, read_metrics, write_json


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"}{", "malformed json"),
        (b"7", "a line of metrics is an object with a whole number 'step'"),
        (b'{"loss": 1}', "a line of metrics is an object with a whole number 'step'"),
        (b'{"step": 2, "loss": "low"}', "'loss' is 'low', not a number or null"),
        (b'{"step": 2, "loss": NaN}', "'loss' is nan, not a number or null"),
        (b'{"step": 2, "step": 3}', "the key 'step' appears twice"),
    ],
)
def test_a_line_that_is_no_metrics_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(RunError, match=rf"metrics\.jsonl:2: .*{message}.* Remove the line"):
        read_metrics(path)


def test_a_run_killed_while_it_goes_back_keeps_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(*_: Any) -> None:
        raise OSError(errno.EINTR, "killed")

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(RunError, match="cannot be written"):
        MetricsFile(path, keep_until=1)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
