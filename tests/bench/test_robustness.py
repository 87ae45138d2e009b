"""A tenth of what `octavo bench robustness` tries, and that what it looks for would be noticed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from octavo_bench import malformed, robustness
from octavo_bench.robustness import Ended


@pytest.mark.parametrize("name", ["malformed files", "malformed command lines"])
def test_malformed_input_ends_in_one_line_that_names_it(name: str) -> None:
    said: list[str] = []
    [row] = robustness.rows_of([name], share=0.1, report=said.append)
    assert row["tried"] == robustness.CLASSES[name][0] // 10
    assert row["survived"] == row["named"] == row["tried"], said


@pytest.mark.parametrize("suffix", malformed.GRAMMAR)
def test_a_seed_gives_the_same_files(tmp_path: Path, suffix: str) -> None:
    if suffix in (".sqlite", ".safetensors"):
        pytest.skip("their mutations need a good file")
    path = tmp_path / f"file{suffix}"
    found = []
    for seed in (*range(20), *range(20)):
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
        path.write_text("a = 1\n" if suffix == ".toml" else '{"a": 1}\n')
        done = malformed.damage(Random(seed), path)
        found.append((done, path.read_bytes() if path.is_file() else b""))
    assert found[:20] == found[20:] and len(set(found)) > 3


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (Ended(0, "fine", ""), ""),
        (Ended(1, "", "octavo: error: a.toml: so\n"), ""),
        (Ended(-1, "", ""), "hangs"),
        (Ended(1, "", "octavo: error: KeyError: 1 (unexpected; OCTAVO_DEBUG=1 shows where)"), "unexpected"),
        (Ended(1, "", "Traceback (most recent call last):\n"), "unexpected"),
        (Ended(1, "", "octavo: error: \x1b[31m"), "a control character reaches the terminal: '\\x1b'"),
        (Ended(1, "", "what"), "no error in one line"),
        (Ended(1, "", "octavo: error: a\nmore"), "the error is not the last line"),
    ],
)
def test_a_bad_end_is_noticed(ended: Ended, fault: str) -> None:
    assert ended.fault == fault
