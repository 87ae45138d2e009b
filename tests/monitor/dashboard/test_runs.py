"""Runs are found below a folder, and nothing else is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from synthetic import synthetic_run

from octavo.errors import StoreError
from octavo.monitor.dashboard import runs
from octavo.monitor.dashboard.runs import RunFolder, RunSelection
from octavo.monitor.store import FILE


@pytest.fixture(autouse=True)
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESCAN_SECONDS", 0.0)


def test_newest_first_by_their_path(folder: Path) -> None:
    os.utime(folder / "first" / FILE)
    assert RunFolder(folder).names() == ["first", "sweep/tensorwise"]
    assert RunFolder(folder).open("sweep/tensorwise").name == "tensorwise"


@pytest.mark.parametrize("named", ["first", f"first/{FILE}"])
def test_a_run_may_be_the_folder(folder: Path, named: str) -> None:
    known = RunFolder(folder / named)
    assert known.names() == ["."]
    assert known.open(".").name == "first"


@pytest.mark.parametrize("name", ["../other", "/etc", "", "..", "first/../first", "frist"])
def test_only_what_was_found_is_opened(tmp_path: Path, name: str) -> None:
    synthetic_run(tmp_path / "other", layers=1, steps=5)
    synthetic_run(tmp_path / "runs" / "first", layers=1, steps=5)
    known = RunFolder(tmp_path / "runs")
    assert known.names() == ["first"]
    with pytest.raises(StoreError, match="no run"):
        known.open(name)


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "other", layers=1, steps=5)
    root = tmp_path / "runs"
    (root / "file").mkdir(parents=True)
    (root / "file" / FILE).symlink_to(tmp_path / "other" / FILE)
    (root / "folder").symlink_to(tmp_path / "other")
    assert RunFolder(root).names() == []


def test_a_run_that_was_started_over_is_read_anew(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "a", layers=1, steps=5)
    known = RunFolder(tmp_path)
    assert known.open("a").last_step == 5
    shutil.rmtree(tmp_path / "a")
    synthetic_run(tmp_path / "a", layers=1, steps=9)
    assert known.open("a").last_step == 9
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(StoreError, match="no run"):
        known.open("a")
    known.close()


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        RunFolder(tmp_path / "nowhere")


def test_chosen_runs_have_names_that_differ(tmp_path: Path) -> None:
    for path in ("a/x", "b/x", "c/y"):
        synthetic_run(tmp_path / path, layers=1, steps=3)
    assert RunSelection([tmp_path / "a/x", tmp_path / "c/y"]).names() == ["x", "y"]
    known = RunSelection([tmp_path / "a/x", tmp_path / "b/x"])
    assert known.names() == ["a/x", "b/x"]
    assert known.open("b/x").path == tmp_path / "b/x" / FILE
    with pytest.raises(StoreError, match="Did you mean"):
        known.open("b/y")
    with pytest.raises(StoreError, match="twice"):
        RunSelection([tmp_path / "a/x", tmp_path / "b" / ".." / "a/x"])
    known.close()
