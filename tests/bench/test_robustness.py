"""A tenth of what `octavo bench robustness` tries, and that what it looks for would be noticed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from octavo.errors import ConfigError
from octavo_bench import campaign, command_line, malformed
from octavo_bench.campaign import Outcome
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
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with a case for each outcome."""

    def raising(error: Exception) -> campaign.Case:
        def case(draw: Random) -> Outcome:
            raise error

        return case

    monkeypatch.setitem(campaign.CASES, "some", {})
    monkeypatch.setitem(campaign.CLASSES, "some", (6, ""))
    for outcome in ("held", "silent", "executed"):
        campaign.case_of("some", outcome)(lambda draw, outcome=outcome: outcome)
    campaign.case_of("some", "a clear refusal", "scale")(raising(ConfigError("scale: not that")))
    campaign.case_of("some", "a refusal of something else", "scale")(raising(ConfigError("weight: not that")))
    campaign.case_of("some", "another error", "scale")(raising(ValueError("scale")))


def test_outcomes_are_counted_and_failed_cases_kept(cases: None) -> None:
    [row] = campaign.rows_of(["some"])
    counts = {key: row[key] for key in ("tried", "survived", "silent", "unclear", "executed")}
    assert counts == {"tried": 6, "survived": 2, "silent": 1, "unclear": 2, "executed": 1}
    assert [line.partition(": ")[0] for line in row["failed"]] == [
        "silent", "executed", "unclear ConfigError", "unclear ValueError",
    ]  # fmt: skip
    assert row["failed"][2] == "unclear ConfigError: weight: not that: some: a refusal of something else"


@pytest.mark.parametrize("kind", [name for name, (_, place) in campaign.CLASSES.items() if not place])
def test_every_case_is_tried(kind: str) -> None:
    [*campaign.trials_of(kind, 0, 0)]  # registers them
    assert campaign.CLASSES[kind][0] >= len(campaign.CASES[kind])


def test_a_seed_draws_the_same_cases() -> None:
    first, again, other = (
        [trial.outcome for trial in campaign.trials_of("layers alone", 20, seed)] for seed in (3, 3, 4)
    )
    assert first == again and len(first) == len(other) == 20


def test_a_command_that_hangs_is_lost_and_one_that_accepts_damage_silent() -> None:
    ends = {
        Ended(-1, "", ""): "lost", Ended(0, "fine", ""): "silent", Ended(1, "", "octavo: error: a.toml\n"): "unclear",
        Ended(1, "", "Traceback (most recent call last):\n"): "unclear",
    }  # fmt: skip
    for ended, outcome in ends.items():
        assert command_line._judged("kind", "about", ended, False, "accepted").outcome == outcome
