"""A tenth of what `octavo bench robustness` tries, and that what it looks for would be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from octavo_bench import campaign, command_line, malformed
from octavo_bench.campaign import Outcome, Trial
from octavo_bench.command_line import Ended


@pytest.mark.parametrize("name", ["malformed files", "malformed command lines"])
def test_malformed_input_ends_in_one_line_that_names_it(name: str) -> None:
    said: list[str] = []
    [row] = campaign.rows_of([name], share=0.1, report=said.append)
    assert row["tried"] == campaign.CLASSES[name][0] // 10
    assert row["survived"] == row["tried"], said


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


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with a trial of each outcome."""

    def trials(tried: int, seed: int) -> Iterator[Trial]:
        outcomes: tuple[Outcome, ...] = ("held", "refused", "silent", "unclear", "lost")
        yield from (Trial("some", str(seed), outcome) for outcome in outcomes[:tried])

    monkeypatch.setattr(command_line, "malformed_files", trials)


def test_outcomes_are_counted_and_failed_trials_kept(ends: None) -> None:
    [row] = campaign.rows_of(["malformed files"], seed=3)
    counts = {key: row[key] for key in ("tried", "survived", "silent", "unclear", "seed")}
    assert counts == {"tried": 5, "survived": 2, "silent": 1, "unclear": 1, "seed": 3}
    assert row["failed"] == ["silent: some: 3", "unclear: some: 3", "lost: some: 3"]


def test_classes_that_have_become_tests_are_not_shown() -> None:
    row = {"class": "malformed files", "tried": 9, "survived": 9, "silent": 0, "unclear": 0, "executed": 0, "seed": 0}
    gone = row | {"class": "written inputs"}
    assert campaign.KIND.markdown([gone]) == ""
    assert campaign.KIND.markdown([row, gone]).splitlines()[2:] == ["| malformed files | 9 | 9 | 0 | 0 |"]


def test_a_command_that_hangs_is_lost_and_one_that_accepts_damage_silent() -> None:
    ends = {
        Ended(-1, "", ""): "lost", Ended(0, "fine", ""): "silent", Ended(1, "", "octavo: error: a.toml\n"): "unclear",
        Ended(1, "", "Traceback (most recent call last):\n"): "unclear",
    }  # fmt: skip
    for ended, outcome in ends.items():
        assert command_line._judged("kind", "about", ended, False, "accepted").outcome == outcome
