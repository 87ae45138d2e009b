"""Reading a run; comparing configurations."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_run

from octavo.errors import StoreError
from octavo.lab.monitor.store import (
    ROLES,
    STATS,
    RunReader,
    RunWriter,
    TensorRow,
    config_difference,
    find_runs,
)
from octavo.lab.monitor.store.series import gaps


def written(path: Path, values: np.ndarray, steps: list[int] | None = None) -> RunReader:
    """Return a run of one layer: `values` (n, 4) are the `flushed` of its roles."""
    with RunWriter(path) as run:
        run.set_tensors([TensorRow("layer", role) for role in ROLES])
        for step, row in zip(steps or range(1, len(values) + 1), values, strict=True):
            whole = np.zeros((len(ROLES), len(STATS)), dtype=np.float32)
            whole[:, STATS.index("flushed")] = row
            run.write_step(step, {"loss": float(row[0])}, whole)
    return RunReader(path)


@pytest.mark.parametrize("buckets", [1, 3, 7, 31, 50, 1000])
def test_a_heat_map_keeps_every_spike(tmp_path: Path, buckets: int) -> None:
    values = np.random.default_rng(0).random((500, 4)).astype(np.float32)
    values[325, 1] = np.nan  # one of many in its stretch: it hides none of the others
    reader = written(tmp_path, values)
    for pool, extreme in (("max", np.fmax), ("min", np.fmin)):
        heat = reader.heatmap("flushed", "weight", buckets=buckets, pool=pool)
        assert heat.values.shape == (1, min(buckets, 500)) or buckets in (7, 31, 50)
        assert heat.values.shape[1] <= buckets
        for first, last, found in zip(heat.first, heat.last, heat.values[0], strict=True):
            assert np.array_equal(found, extreme.reduce(values[first - 1 : last, 1]), equal_nan=True)
        assert np.array_equal(heat.first[1:], heat.last[:-1] + 1)  # nothing is left out, nothing counted twice
        assert (heat.first[0], heat.last[-1]) == (1, 500)


def test_a_part_of_a_run_is_that_part(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((500, 4)).astype(np.float32)
    reader = written(tmp_path, values)
    heat = reader.heatmap("flushed", "input", first=90, last=410, buckets=5)
    assert (heat.first[0], heat.last[-1], heat.values.max()) == (90, 410, values[89:410, 0].max())
    series = reader.series("layer", "input", "flushed", first=90, last=110)
    assert np.array_equal(series.low, values[89:110, 0]) and series.is_exact
    assert reader.scalar("loss", first=90, last=110).first.tolist() == list(range(90, 111))
    assert len(reader.heatmap("flushed", "input", first=501).first) == 0


@pytest.mark.parametrize("points", [2, 10, 100, 499, None])
def test_a_series_keeps_every_spike(tmp_path: Path, points: int | None) -> None:
    values = np.random.default_rng(2).random((500, 4)).astype(np.float32)
    values[123, 2] = 9.0
    values[321, 2] = np.nan
    reader = written(tmp_path, values)
    for series in (reader.series("layer", "grad_output", "flushed", points=points),):
        steps, drawn = series.points()
        assert points is None or len(drawn) <= points
        assert np.nanmax(drawn) == 9.0 and np.nanmin(drawn) == np.nanmin(values[:, 2])
        assert (np.diff(steps) > 0).all()
        for i in range(len(series)):
            window = values[series.first[i] - 1 : series.last[i], 2]
            if not np.isnan(window).all():
                assert (series.low[i], series.high[i]) == (np.nanmin(window), np.nanmax(window))
    loss = reader.scalar("loss", points=points)
    assert loss.low.min() == values[:, 0].min() and loss.high.max() == values[:, 0].max()


def test_scalars_of_a_long_run_are_merged_before_they_are_read(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run, run.batch():
        for step in range(1, 20_001):
            run.write_step(step, {"loss": 9.0 if step == 777 else 1.0 if step % 2 else 2.0})
    reader = RunReader(tmp_path)
    whole, drawn = reader.scalar("loss"), reader.scalar("loss", points=100)
    assert len(whole) == 20_000 and whole.is_exact
    assert len(drawn) == 50 and (drawn.first[0], drawn.last[-1]) == (1, 20_000)
    assert (drawn.low == 1.0).all() and list(drawn.high[drawn.high > 2]) == [9.0]
    tracemalloc.start()
    reader.scalar("loss", points=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000  # all rows take more than 2 MB


def test_all_roles_of_a_layer_at_once(tmp_path: Path) -> None:
    reader = written(tmp_path, np.random.default_rng(3).random((500, 4)).astype(np.float32))
    for points in (None, 10, 2000):
        together = reader.series_by_role("layer", "flushed", points=points)
        assert list(together) == list(ROLES)
        for role, series in together.items():
            alone = reader.series("layer", role, "flushed", points=points)
            assert np.array_equal(series.points(), alone.points())


def test_snapshots_at_odd_steps(tmp_path: Path) -> None:
    steps = [1, 5, 6, 100, 10_000]
    reader = written(tmp_path, np.arange(20, dtype=np.float32).reshape(5, 4), steps)
    heat = reader.heatmap("flushed", "input")
    assert heat.first.tolist() == heat.last.tolist() == steps
    assert heat.values.tolist() == [[0.0, 4.0, 8.0, 12.0, 16.0]]
    assert reader.snapshot(99)[0] == 6
    with pytest.raises(StoreError, match="no telemetry at or before step 0"):
        reader.snapshot(0)


def test_a_tensor_that_a_live_run_adds_does_not_stop_a_reader_of_all_snapshots(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        for step in (1, 2, 3):
            run.set_tensors([TensorRow(f"layer {number}", "input") for number in range(step)])
            run.write_step(step, None, np.full((step, len(STATS)), step))
            if step == 1:
                batches = RunReader(tmp_path).snapshots(batch=1)
                assert next(batches)[0].tolist() == [1]
    assert [(steps.tolist(), values.shape) for steps, values in batches] == [([step], (1, 1, 10)) for step in (2, 3)]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda r: r.series("layr", "input", "amax"), "Did you mean 'layer / input'"),
        (lambda r: r.series("layer", "input", "amaks"), "Did you mean 'amax'"),
        (lambda r: r.heatmap("amax", "output"), "not 'output'"),
        (lambda r: r.heatmap("amax", "input", pool="mean"), "'input', 'mean'"),
        (lambda r: r.document("konfig"), "Did you mean 'config'"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(tmp_path: Path, ask, says: str) -> None:
    reader = written(tmp_path, np.zeros((1, 4)))
    with pytest.raises(StoreError, match=says):
        ask(reader)


def test_an_empty_run_reads_as_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path):
        reader = RunReader(tmp_path)
        assert (reader.keys(), reader.events(), reader.system(), reader.tensors, reader.last_step) == (
            [],
            [],
            [],
            [],
            0,
        )
        assert reader.heatmap("amax", "input").values.shape == (0, 0)
        assert len(reader.scalar("loss")) == 0 and reader.config == {} and reader.state() == "running"


def test_a_run_is_read_by_many_threads_while_it_is_written(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.set_tensors([TensorRow("layer", "input")])
    reader, failures, done = RunReader(tmp_path), [], threading.Event()

    def follow() -> None:
        seen = 0
        while not done.is_set():
            steps = reader.scalar("loss").first
            heat = reader.heatmap("amax", "input", buckets=4)
            if steps.tolist() != list(range(1, len(steps) + 1)) or len(steps) < seen:
                failures.append(steps)
            if len(heat.first) and heat.values.max() < seen:
                failures.append(heat)
            seen = len(steps)

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    versions = set()
    for step in range(1, 201):
        run.write_step(step, {"loss": step}, np.full((1, len(STATS)), step))
        versions.add(reader.version())
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(versions) == 200
    run.close()


def test_a_killed_run_is_silent_and_then_its_end_is_unknown(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, layers=1, steps=5, finished=False)
    assert RunReader(tmp_path).state(silent_after=1e12) == "running"
    assert RunReader(tmp_path).state(silent_after=0) == "silent"
    run.close("failed", "why")
    assert RunReader(tmp_path).state() == "failed"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
@pytest.mark.parametrize("was_killed", [False, True])
def test_the_duration_of_a_run_is_without_its_pauses(tmp_path: Path, was_killed: bool) -> None:
    for done in (0, 2):
        with RunWriter(tmp_path, keep_until=done or None) as run:
            run.write_step(done + 1, {"loss": 1.0})
            run.write_step(done + 2, {"loss": 1.0})
    times = [1000.0, 1050.0, 9000.0, 9030.0]
    with sqlite3.connect(tmp_path / "run.sqlite") as store:
        for step, at in enumerate(times, start=1):
            store.execute("UPDATE scalars SET value = ? WHERE key = 'time' AND step = ?", (at, step))
        store.execute("UPDATE sessions SET started = 990, ended = ? WHERE id = 1", (None if was_killed else 1060.0,))
        store.execute("UPDATE sessions SET started = 8990, ended = 9040 WHERE id = 2")
    with RunReader(tmp_path) as reader:
        assert reader.pauses == [(1050.0 if was_killed else 1060.0, 8990.0)]
        assert reader.duration == (60 if was_killed else 70) + 50


def test_a_run_in_a_folder_that_nobody_may_write(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=5)
    (tmp_path / "run").chmod(0o555)
    try:
        assert RunReader(tmp_path / "run").last_step == 5
    finally:
        (tmp_path / "run").chmod(0o755)


def test_a_finished_run_is_one_file_that_can_be_moved(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=5)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.sqlite"]
    (tmp_path / "a b%20?#").mkdir()
    shutil.copy(tmp_path / "run" / "run.sqlite", tmp_path / "a b%20?#")
    assert RunReader(tmp_path / "a b%20?#").last_step == 5


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/er"):
        RunWriter(tmp_path / name).close()
    (tmp_path / "none").mkdir()
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["a", "b", "deep/er"]


@pytest.mark.parametrize(
    ("covered", "missing"),
    [
        ([], [(1, 10)]),
        ([(1, 10)], []),
        ([(3, 4), (6, 7)], [(1, 2), (5, 5), (8, 10)]),
        ([(1, 2), (3, 10)], []),
    ],
)
def test_gaps_are_what_is_not_covered(covered, missing) -> None:
    assert gaps(covered, 1, 10) == missing


def test_configurations_are_compared(tmp_path: Path) -> None:
    for name, options in {"a": {}, "b": {"recipe": "block", "baseline": False, "steps": 10}}.items():
        synthetic_run(tmp_path / name, layers=1, **{"steps": 20, **options})
    runs = [RunReader(tmp_path / name) for name in ("a", "b")]
    assert {d.key: d.values for d in config_difference(runs)} == {
        "run.steps": (20, 10),
        "run.recipe": ("folded", "block"),
        "run.baseline": (True, False),
    }
    assert config_difference(runs[:1]) == []
