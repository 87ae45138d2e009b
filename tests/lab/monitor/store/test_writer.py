from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import StoreError
from octavo.lab.monitor.store import STATS, RunReader, RunWriter, TensorRow, schema

ROWS = [TensorRow("a", "input"), TensorRow("a", "weight", "e4m3 per-row", (4, 8))]


def snapshot(value: float, rows: int = 2) -> np.ndarray:
    return np.full((rows, len(STATS)), value, dtype=np.float32)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as run:
        run.set_tensors(ROWS)
        run.write_document("config", {"run": {"out": tmp_path, "lr": float("nan")}})
        run.write_step(1, {"loss": 5.5, "bad": float("nan"), "worse": float("inf")}, snapshot(1.0), t=10.0)
        run.write_event(1, "rule", "text", level="error", layer="a", role="input", value=2.0, limit=1.0, action="none")
        run.write_histograms(1, -3, [[0, 0, 0], [1, 2, 3]])
        run.write_system({"load": 0.5}, t=11.0)
    reader = RunReader(tmp_path / "run")
    assert reader.config == {"run": {"out": str(tmp_path), "lr": None}}
    assert reader.keys() == ["bad", "loss", "time", "worse"]
    assert {key: series.low.tolist()[0] for key, series in reader.scalars(["loss", "worse", "time"]).items()} == {
        "loss": 5.5,
        "worse": float("inf"),
        "time": 10.0,
    }
    assert np.isnan(reader.scalar("bad").low).all()
    assert reader.tensors == ROWS
    step, values = reader.snapshot()
    assert step == 1 and np.array_equal(values, snapshot(1.0))
    event = reader.events()[0]
    assert event[3:] == ("error", "rule", "a", "input", 2.0, 1.0, "none", "text")
    found = reader.histogram("a", "weight")
    assert found is not None and (found[0], found[1], found[2].tolist()) == (1, -3, [1, 2, 3])
    assert reader.system() == [{"t": 11.0, "load": 0.5}]
    assert (reader.state(), reader.last_step, reader.name) == ("finished", 1, "run")


def test_histograms_of_all_tensors_lie_at_their_places_without_empty_ends(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.set_tensors(ROWS)
        run.set_tensors(ROWS[::-1])  # another order of the same tensors
        counts = np.array([[0, 0, 5, 0, 2**24, 0], [np.nan] * 6], dtype=np.float32)
        run.write_histograms(7, -40, counts)
        with pytest.raises(ValueError, match="shorter"):
            run.write_histograms(8, -40, counts[:1])
    reader = RunReader(tmp_path)
    last, first = ROWS[::-1][:2]
    found = reader.histogram(last.layer, last.role)
    assert found is not None and (found[0], found[1], found[2].tolist()) == (7, -38, [5, 0, 2**24])
    assert reader.histogram(first.layer, first.role) is None


def test_a_run_is_not_written_over_by_accident(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    with pytest.raises(StoreError, match="contains a run already"):
        RunWriter(tmp_path)
    with RunWriter(tmp_path, overwrite=True) as run:
        run.write_step(1, {"loss": 1.0})
    with RunWriter(tmp_path, overwrite=True):
        pass
    reader = RunReader(tmp_path)
    assert (reader.keys(), len(reader.sessions)) == ([], 1)


def test_appending_cuts_what_lies_past_the_checkpoint(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.set_tensors(ROWS)
        for step in range(1, 41):
            run.write_step(step, {"loss": step}, snapshot(step))
            run.write_event(step, "tick", str(step))
    with RunWriter(tmp_path, keep_until=20) as run:
        run.set_tensors(ROWS)
        for step in range(21, 61):
            run.write_step(step, {"loss": -step}, snapshot(-step))
    reader = RunReader(tmp_path)
    steps = np.arange(1, 61)
    expected = np.where(steps > 20, -steps, steps)
    assert np.array_equal(reader.scalar("loss").low, expected)
    assert reader.snapshot_steps().tolist() == steps.tolist()
    assert [event.step for event in reader.events()] == list(range(1, 21))
    # The span of steps 17 to 32 went with the cut; its first steps are read one by one.
    heat = reader.heatmap("amax", "input", buckets=3)
    assert heat.values.max() == 20 and reader.heatmap("amax", "input", pool="min", buckets=3).values.min() == -60
    assert [session.first_step for session in reader.sessions] == [0, 20]


def test_a_tensor_keeps_its_place_when_others_come_and_go(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.set_tensors(ROWS)
        run.write_step(1, None, snapshot(1.0))
        run.set_tensors([TensorRow("b", "input"), ROWS[0]])
        run.write_step(2, None, np.stack([np.full(len(STATS), 20.0), np.full(len(STATS), 10.0)]))
    reader = RunReader(tmp_path)
    assert [row.layer for row in reader.tensors] == ["a", "a", "b"]
    assert reader.series("a", "input", "amax").low.tolist() == [1.0, 10.0]
    assert np.array_equal(reader.series("b", "input", "amax").low, [np.nan, 20.0], equal_nan=True)
    assert np.array_equal(reader.series("a", "weight", "amax").low, [1.0, np.nan], equal_nan=True)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda run: run.write_step(1, None, snapshot(1.0, rows=3)), r"Got \(3, 10\)"),
        (lambda run: run.write_step(5, None, snapshot(1.0)), "after step 5"),
        (lambda run: run.set_tensors([ROWS[0], ROWS[0]]), "a / input appears twice"),
        (lambda run: run.write_document("konfig", {}), "unknown document 'konfig'"),
        (lambda run: run.write_event(1, "r", "t", level="fatal"), "info, warning or error"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_trace(tmp_path: Path, write, says: str) -> None:
    with RunWriter(tmp_path) as run:
        run.set_tensors(ROWS)
        run.write_step(5, None, snapshot(1.0))
        with pytest.raises(StoreError, match=says):
            write(run)
        run.write_step(6, None, snapshot(2.0))
    assert RunReader(tmp_path).snapshot_steps().tolist() == [5, 6]


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        with pytest.raises(ZeroDivisionError), run.batch():
            run.write_step(1, {"loss": 1.0})
            raise ZeroDivisionError
        run.write_step(2, {"loss": 2.0})
    assert RunReader(tmp_path).scalar("loss").first.tolist() == [2]


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed"), (None, "finished")]
)
def test_the_store_knows_how_the_run_ended(tmp_path: Path, error: type[BaseException] | None, state: str) -> None:
    try:
        with RunWriter(tmp_path):
            if error:
                raise error("why")
    except (KeyboardInterrupt, ZeroDivisionError):
        pass
    reader = RunReader(tmp_path)
    assert reader.state() == state
    assert reader.sessions[0].text == ("ZeroDivisionError: why" if state == "failed" else "")


def test_other_files_are_refused_clearly(tmp_path: Path) -> None:
    text, foreign, newer = (tmp_path / f"{name}.sqlite" for name in ("text", "foreign", "newer"))
    text.write_text("this is no database, however long it may be" * 100)
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE songs (name)")
    RunWriter(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    for path, says in ((text, "nor a SQLite file"), (foreign, "of another program"), (newer, "Update octavo")):
        before = path.read_bytes()
        for open_it in (RunReader, RunWriter, lambda path: RunWriter(path, overwrite=True)):
            with pytest.raises(StoreError, match=says):
                open_it(path)
        assert path.read_bytes() == before
    with pytest.raises(StoreError, match="no run found"):
        RunReader(tmp_path / "nowhere")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        RunWriter(tmp_path / "file" / "run")


def test_a_full_disk_is_said_and_costs_only_what_had_no_room(tmp_path: Path) -> None:
    run = RunWriter(tmp_path)
    run.set_tensors(ROWS)
    run.write_step(1, {"loss": 1.0}, snapshot(1.0))
    pages = run._execute("PRAGMA page_count").fetchone()[0]
    run._execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own full disk
    with pytest.raises(StoreError, match=r"cannot be written .*full"):
        for step in range(2, 100):
            run.write_step(step, {"loss": step}, snapshot(step))
    run._execute(f"PRAGMA max_page_count = {pages + 100}")
    run.write_step(100, {"loss": 100.0}, snapshot(100.0))
    run.close()
    assert RunReader(tmp_path).last_step == 100


class FailingCommits:
    """A connection whose next commit fails, as with a disk that is full."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection, self.fails = connection, False

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        if statement == "COMMIT" and self.fails:
            self.fails = False
            raise sqlite3.OperationalError("database or disk is full")
        return self.connection.execute(statement, *values)

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def test_what_was_not_committed_can_be_written_again(tmp_path: Path) -> None:
    """The same file as of a writer whose commits all succeed: snapshots, their spans, rows and what was cut."""
    files = []
    for name, failing in (("good", ()), ("bad", ("tensors", 1, schema.SPAN, 20, "more tensors", 25, "cut"))):
        with RunWriter(tmp_path / name) as run:
            connection = FailingCommits(run._connection)
            run._connection = connection  # type: ignore[assignment]

            def write(what: object, call: Callable[[], None], connection=connection, failing=failing) -> None:
                if what in failing:
                    connection.fails = True
                    with pytest.raises(StoreError, match="full"):
                        call()
                    assert not connection.fails
                call()

            write("tensors", lambda run=run: run.set_tensors(ROWS[:1]))
            for step in range(1, 40):
                if step == 22:
                    write("more tensors", lambda run=run: run.set_tensors(ROWS))
                rows = 1 if step < 22 else 2
                write(
                    step, lambda run=run, step=step, rows=rows: run.write_step(step, {}, snapshot(step, rows), t=step)
                )
            write("cut", lambda run=run: run.cut(30))
            run.write_step(31, {}, snapshot(31), t=31)
        with sqlite3.connect(tmp_path / name / "run.sqlite") as file:
            tables = ("telemetry", "telemetry_span", "tensors")
            files.append([file.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables])
    assert len(files[0][0]) == 31 and files[0] == files[1]


def test_a_step_of_226_layers_is_written_quickly(tmp_path: Path) -> None:
    """The target is 1 ms per step; twice that of the processor's time is allowed here, where others share it."""
    rows = [TensorRow(f"layers.{i}", role) for i in range(226) for role in schema.ROLES]
    values = np.random.default_rng(0).standard_normal((len(rows), len(STATS))).astype(np.float32)
    scalars = {f"scalar_{i}": 1.0 for i in range(12)}
    times = []
    with RunWriter(tmp_path) as run:
        run.set_tensors(rows)
        for step in range(1, 301):
            start = time.thread_time()
            run.write_step(step, scalars, values)
            times.append(time.thread_time() - start)
        start = time.thread_time()
        run.write_histograms(300, -40, np.full((len(rows), 64), 1e6, dtype=np.float32))
        histograms = time.thread_time() - start
    assert np.median(times) < 2e-3
    assert histograms < 100 * 1e-3 / 2  # one in a hundred steps: half a millisecond a step
