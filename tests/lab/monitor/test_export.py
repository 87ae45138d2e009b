from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_run

from octavo.errors import ConfigError, StoreError, UnsupportedError
from octavo.lab.monitor.export import FORMATS, export
from octavo.lab.monitor.store import STATS, RunReader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    synthetic_run(folder, layers=3, steps=150, telemetry_every=1)
    return folder


def test_csv(run: Path, tmp_path: Path) -> None:
    written = export(run, "csv", tmp_path / "out")
    assert sorted(path.name for path in written) == [
        "events.csv",
        "histograms.csv",
        "scalars.csv",
        "system.csv",
        "telemetry.csv",
        "tensors.csv",
    ]
    reader = RunReader(run)
    with (tmp_path / "out" / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_fp8"]) for row in rows] == reader.scalar("loss_fp8").low.tolist()
    assert [int(row["step"]) for row in rows] == list(range(1, 151))
    with (tmp_path / "out" / "telemetry.csv").open() as file:
        telemetry = list(csv.DictReader(file))
    assert len(telemetry) == 150 * 12
    last = [row for row in telemetry if row["step"] == "150"]
    values = np.array([[float(row[stat] or "nan") for stat in STATS] for row in last], dtype=np.float32)
    assert np.array_equal(values, reader.snapshot(150)[1], equal_nan=True)
    assert [(row["layer"], row["role"]) for row in last] == [(row.layer, row.role) for row in reader.tensors]
    with (tmp_path / "out" / "histograms.csv").open() as file:
        bins = [row for row in csv.DictReader(file) if (row["layer"], row["role"]) == (last[0]["layer"], "input")]
    step, low, counts = reader.histogram(last[0]["layer"], "input") or (0, 0, np.zeros(0))
    assert [int(row["count"]) for row in bins] == counts.tolist()
    assert (int(bins[0]["step"]), int(bins[0]["exponent"])) == (step, low)


def test_parquet_holds_what_csv_holds(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(run, "parquet", tmp_path)
    reader = RunReader(run)
    telemetry = parquet.read_table(tmp_path / "telemetry.parquet").to_pydict()
    flushed = reader.series("layers.0.attention.wk", "weight", "flushed", points=None).low
    chosen = [
        value
        for value, layer, role in zip(telemetry["flushed"], telemetry["layer"], telemetry["role"], strict=True)
        if (layer, role) == ("layers.0.attention.wk", "weight")
    ]
    assert np.array_equal(chosen, flushed)
    scalars = parquet.read_table(tmp_path / "scalars.parquet").to_pydict()
    assert scalars["loss_bf16"] == reader.scalar("loss_bf16").low.tolist()
    assert parquet.read_table(tmp_path / "events.parquet").to_pydict()["rule"] == ["saturation"]


def test_a_scalar_that_is_not_there_at_a_step_is_an_empty_cell(tmp_path: Path) -> None:
    with synthetic_run(tmp_path / "run", layers=1, steps=2, baseline=False, finished=False) as writer:
        writer.write_step(3, {"heldout_loss_fp8": 2.5}, t=0.0)
    export(tmp_path / "run", "csv", tmp_path)
    with (tmp_path / "scalars.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["heldout_loss_fp8"] for row in rows] == ["", "", "2.5"] and rows[2]["loss_fp8"] == ""


@pytest.mark.parametrize("to", FORMATS)
def test_an_empty_run_is_exported(tmp_path: Path, to: str) -> None:
    pytest.importorskip({"parquet": "pyarrow", "tensorboard": "tensorboard"}.get(to, "csv"))
    synthetic_run(tmp_path / "run", layers=1, steps=0)
    assert all(path.is_file() for path in export(tmp_path / "run", to, tmp_path / "out"))


def test_what_goes_wrong_is_said(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'parquet'"):
        export(run, "parket", tmp_path)
    with pytest.raises(StoreError, match="no run found"):
        export(tmp_path / "nowhere", "csv", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        export(run, "csv", tmp_path / "file")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r'pip install "octavo\[parquet\]"'):
        export(run, "parquet", tmp_path)
