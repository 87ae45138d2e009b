"""Event files, read by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import synthetic_run

from octavo.errors import UnsupportedError
from octavo.lab.monitor.export import export
from octavo.lab.monitor.store import RunReader, RunWriter


def read(folder: Path) -> dict[str, list[Any]]:
    """Return (wall clock, step, value) by tag."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.wall_time, event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_scalars_and_aggregates_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    synthetic_run(tmp_path / "run", layers=3, steps=300, telemetry_every=50, spike_at=0)
    (path,) = export(tmp_path / "run", "tensorboard", tmp_path / "logs")
    assert ".tfevents." in path.name
    series, run = read(tmp_path / "logs"), RunReader(tmp_path / "run")
    for key in ("loss_fp8", "gap_percent"):
        expected = run.scalar(key)
        assert [step for _, step, _ in series[key]] == expected.first.tolist()
        assert [value for _, _, value in series[key]] == pytest.approx(expected.low.tolist(), rel=1e-6)
    assert [(step, wall) for wall, step, _ in series["fp8/flushed_max"]] == [
        (step, pytest.approx(1.7e9 + 0.1 * step)) for step in range(50, 301, 50)
    ]
    assert "time" not in series and len(series) <= 12 + 9


def test_large_steps_and_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with RunWriter(tmp_path) as run:
        run.write_step(2**40, {"loss": 1e300, "gap": float("-inf")}, t=1.0)
    export(tmp_path, "tensorboard", tmp_path / "logs")
    infinity = float("inf")
    assert read(tmp_path / "logs") == {"loss": [(1.0, 2**40, infinity)], "gap": [(1.0, 2**40, -infinity)]}


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=20)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UnsupportedError, match=r"octavo\[tensorboard\]"):
        export(tmp_path / "run", "tensorboard", tmp_path / "logs")
