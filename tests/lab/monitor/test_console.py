"""The file of a console keeps its beginning and its newest lines, and never ends a run."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from octavo.lab.monitor.console import ConsoleFile, newest


def test_what_is_written_before_it_is_open_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text("an earlier process\n")
    file = ConsoleFile()
    file.write("reading\n")
    file.open(path)
    file.write("step 1\n")
    file.open(tmp_path / "another")  # the first one counts
    assert path.read_text() == "an earlier process\nreading\nstep 1\n"


def test_it_outlives_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run" / "console.log"
    path.parent.mkdir()
    file = ConsoleFile()
    file.open(path)
    file.write("one\n")
    path.unlink()
    file.write("two\n")
    assert path.read_text() == "one\ntwo\n"
    shutil.rmtree(path.parent)
    file.write("three\n")
    file.move(tmp_path / "console.log")
    file.write("four\n")
    file.close()
    assert (tmp_path / "console.log").read_text() == "one\ntwo\nthree\nfour\n"


def test_a_full_file_keeps_its_head_and_its_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    file = ConsoleFile(limit=1000, head=100)
    file.open(path)
    for step in range(1000):
        file.write(f"step {step:04}\n")
        assert path.stat().st_size <= 1000
    lines = path.read_text().splitlines()
    assert lines[:10] == [f"step {step:04}" for step in range(10)] and lines[-1] == "step 0999"
    kept = [int(line.split()[1]) for line in lines[11:]]
    assert kept == list(range(kept[0], 1000)) and len(kept) >= 40
    assert lines[10] == f"[{kept[0] - 10} lines left out here: console.log is full]"  # of all times that it was full


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_is_longer_than_the_file_is_cut(tmp_path: Path, end: str) -> None:
    path = tmp_path / "console.log"
    file = ConsoleFile(limit=1000, head=100)
    file.open(path)
    file.write("how it was started\n")
    for number in range(400):
        file.write(f"{number:03} ")
        assert path.stat().st_size <= 1000
    file.write(end)
    assert path.read_text().startswith("how it was started\n[0 lines left out here")
    assert path.read_text().endswith(f"398 399 {end}")


def test_a_file_that_cannot_be_written_is_given_up_with_a_warning(tmp_path: Path) -> None:
    file = ConsoleFile()
    file.write("a line\n")
    with pytest.warns(UserWarning, match="gone/console.log: cannot be written"):
        file.open(tmp_path / "gone" / "console.log")
    file.write("silent from here\n")


@pytest.mark.parametrize(("limit", "told"), [(99, ("a\nbb\nccc\n", 0)), (6, ("ccc\n", 5)), (4, ("", 9))])
def test_the_newest_lines_are_whole(limit: int, told: tuple[str, int]) -> None:
    assert newest(io.BytesIO(b"a\nbb\nccc\n"), limit) == told
