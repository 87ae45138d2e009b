"""Runs are found below a folder, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import synthetic_run

from octavo.errors import StoreError
from octavo.lab.monitor.dashboard import answers, report, runs
from octavo.lab.monitor.dashboard.runs import runs_below, runs_named
from octavo.lab.monitor.store import FILE, RunReader, schema


@pytest.fixture(autouse=True)
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESCAN_SECONDS", 0.0)


def test_newest_first_by_their_path(folder: Path) -> None:
    os.utime(folder / "first" / FILE)
    assert runs_below(folder).names() == ["first", "sweep/tensorwise"]
    assert runs_below(folder).open("sweep/tensorwise").name == "tensorwise"


def test_reading_a_run_does_not_make_it_the_newest(folder: Path) -> None:
    for age, name in enumerate(("sweep/tensorwise", "first")):
        for file in (folder / name).iterdir():
            os.utime(file, (time.time() - 100 * (age + 1),) * 2)
    known = runs_below(folder)
    assert known.names() == ["sweep/tensorwise", "first"]
    reading = RunReader(folder / "first")
    log = folder / "first" / f"{FILE}-wal"
    log.touch()  # as SQLite does for a reader of a file in WAL mode
    assert known.names() == runs_below(folder).names() == ["sweep/tensorwise", "first"]
    log.write_bytes(b"frames of a writer")
    assert runs_below(folder).names() == ["first", "sweep/tensorwise"]
    log.unlink()
    reading.close()


@pytest.mark.parametrize("named", ["first", f"first/{FILE}"])
def test_a_run_may_be_the_folder(folder: Path, named: str) -> None:
    known = runs_below(folder / named)
    assert known.names() == ["."]
    assert known.open(".").name == "first"


@pytest.mark.parametrize("name", ["../other", "/etc", "", "..", "first/../first", "frist"])
def test_only_what_was_found_is_opened(tmp_path: Path, name: str) -> None:
    synthetic_run(tmp_path / "other", layers=1, steps=5)
    synthetic_run(tmp_path / "runs" / "first", layers=1, steps=5)
    known = runs_below(tmp_path / "runs")
    assert known.names() == ["first"]
    with pytest.raises(StoreError, match="no run"):
        known.open(name)


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "other", layers=1, steps=5)
    root = tmp_path / "runs"
    (root / "file").mkdir(parents=True)
    (root / "file" / FILE).symlink_to(tmp_path / "other" / FILE)
    (root / "folder").symlink_to(tmp_path / "other")
    assert runs_below(root).names() == []


def test_a_run_that_was_started_over_is_read_anew(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "a", layers=1, steps=5)
    known = runs_below(tmp_path)
    assert known.open("a").last_step == 5
    shutil.rmtree(tmp_path / "a")
    synthetic_run(tmp_path / "a", layers=1, steps=9)
    assert known.open("a").last_step == 9
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(StoreError, match="no run"):
        known.open("a")
    known.close()


def test_a_run_that_was_deleted_is_closed(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "gone", layers=7, steps=8)
    known = runs_below(tmp_path)
    reader = known.open("gone")
    shutil.rmtree(tmp_path / "gone")
    assert known.names() == []
    with pytest.raises(StoreError, match="closed"):
        reader.keys()


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        runs_below(tmp_path / "nowhere")


def test_chosen_runs_have_names_that_differ(tmp_path: Path) -> None:
    for path in ("a/x", "b/x", "c/y"):
        synthetic_run(tmp_path / path, layers=1, steps=3)
    assert runs_named(tmp_path / "a/x", tmp_path / "c/y").names() == ["x", "y"]
    known = runs_named(tmp_path / "a/x", tmp_path / "b/x")
    assert known.names() == ["a/x", "b/x"]
    assert known.open("b/x").path == tmp_path / "b/x" / FILE
    with pytest.raises(StoreError, match="Did you mean"):
        known.open("b/y")
    with pytest.raises(StoreError, match="twice"):
        runs_named(tmp_path / "a/x", tmp_path / "b" / ".." / "a/x")
    known.close()


def half_born(folder: Path) -> Path:
    """A store whose writer was killed between its tables and its first session."""
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / FILE)) as database:
        schema.create(database, 0.0)
    return folder


def endless(folder: Path) -> Path:
    """A store of an attacker: a table is a view without an end."""
    half_born(folder)
    with contextlib.closing(sqlite3.connect(folder / FILE)) as database:
        database.execute("DROP TABLE events")
        rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, i AS step FROM n"
        database.execute(f"CREATE VIEW events AS {rows}")
        database.commit()
    return folder


def damaged(folder: Path) -> Path:
    """A store with a cell that is not what its column says."""
    synthetic_run(folder, layers=1, steps=5)
    with contextlib.closing(sqlite3.connect(folder / FILE)) as database:
        database.execute("UPDATE plan SET json = '{\"layers\": [1]}'")
        database.commit()
    return folder


def truncated(folder: Path) -> Path:
    synthetic_run(folder, layers=1, steps=5)
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[: len(content) // 2])
    return folder


BAD = {
    half_born: "contains no run yet",
    endless: "no table 'events'",
    damaged: "damaged or of another program",
    truncated: "cannot be read",
}


@pytest.mark.parametrize("make", BAD)
def test_one_bad_store_is_one_row_that_says_so(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    synthetic_run(tmp_path / "good", layers=1, steps=5)
    make(tmp_path / "bad")
    for known in (runs_below(tmp_path), runs_named(tmp_path / "good", tmp_path / "bad")):
        rows = {row["id"]: row for row in answers.answer(known, "runs", {})["runs"]}
        assert "error" not in rows["good"] and rows["good"]["step"] == 5
        assert BAD[make] in rows["bad"]["error"] and "bad" in rows["bad"]["error"]
        compared = answers.answer(known, "compare", {"run": ["good", "bad"]})["runs"]
        assert [("error" in row) for row in compared] == [False, True]


def test_a_run_whose_name_is_of_another_encoding_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / os.fsdecode(b"caf\xe9\x1b[2J")
    synthetic_run(path, layers=1, steps=5)
    for known in (runs_below(tmp_path), runs_named(path)):
        [name] = known.names()
        assert name == r"caf\udce9\x1b[2J" and known.open(name).last_step == 5
    html = report.report([path], tmp_path / "report.html")
    assert html.stat().st_size > 2**20


def test_a_query_has_a_time_limit(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=5)
    reader = RunReader(tmp_path / "run", seconds=0.05)
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(StoreError, match=r"too large to be shown: a query took 0\.05 s"):
        reader._all(slow)
    assert reader.last_step == 5


def test_a_store_of_a_million_events_is_listed_in_two_seconds(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=5)
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / FILE)) as database:
        rows = (f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {10**6}) "
                "SELECT NULL, 5, i, 'warning', 'user', NULL, NULL, i, NULL, NULL, 'text ' || i FROM n")  # fmt: skip
        database.execute(f"INSERT INTO events {rows}")
        database.commit()
    known = runs_below(tmp_path)
    seconds = []
    for name, values in (("runs", {}), ("run", {"run": ["run"]}), ("events", {"run": ["run"]})):
        start = time.process_time()
        answer = answers.answer(known, name, values)
        seconds.append(time.process_time() - start)
    assert answer["count"] >= 10**6 and len(answer["events"]) == answers.EVENTS
    assert answer["events"][-1]["text"] == f"text {10**6}"
    assert max(seconds) < 2, seconds


def test_several_folders_are_told_apart_by_their_names(tmp_path: Path) -> None:
    for machine, name in (("one", "a"), ("two", "a"), ("two", "b")):
        synthetic_run(tmp_path / machine / "runs" / name, layers=1, steps=5)
    known = runs_below(tmp_path / "one" / "runs", tmp_path / "two" / "runs")
    assert known.names()[0] == "one/runs/a" and {*known.names()[1:]} == {"two/runs/a", "two/runs/b"}
    assert known.open("two/runs/b").path.parent == tmp_path / "two" / "runs" / "b"
    assert {row["name"] for row in answers.answer(known, "runs", {})["runs"]} == {*known.names()}
    for outside in ("two/runs/../../one/runs/a", "one/runs/b", "a"):
        with pytest.raises(StoreError, match="no run"):
            known.open(outside)
    known.close()
    with pytest.raises(StoreError, match="named twice"):
        runs_below(tmp_path / "one", tmp_path / "one")
