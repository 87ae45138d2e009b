"""Kills of runs and ranks: a share of what `octavo bench robustness` tries, and that a run which differs is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from octavo_bench import crash

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="kill_at.c is compiled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What forks runs, for all tests: it imports PyTorch, which takes longer than a test."""
    with crash._forks(tmp_path_factory.mktemp("server")) as fork:
        yield fork


@pytest.fixture(scope="module")
def undisturbed(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What stands for `crash._undisturbed`: a run of each mode, once for all tests."""
    place = tmp_path_factory.mktemp("undisturbed")
    crash._write_run(place)
    make = cache(partial(crash._undisturbed, place, server))
    return lambda _place, _fork, mode="watch": make(mode)


@pytest.fixture(autouse=True)
def one_server(server: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def forks(place: Path) -> Iterator[Any]:
        crash._write_run(place)
        yield server

    monkeypatch.setattr(crash, "_forks", forks)
    monkeypatch.setattr(crash, "_undisturbed", undisturbed)


def test_runs_that_were_killed_end_in_the_same_bits() -> None:
    assert [(trial.outcome, trial.fault) for trial in crash.kills_of_runs(4, seed=1)] == [("held", "")] * 4


def test_a_rank_that_stops_is_named_and_the_run_goes_on() -> None:
    assert [trial[1:] for trial in crash.kills_of_ranks(1, seed=7)] == [("stop of rank 0 in step 3", "held", "")]


def test_a_run_of_other_bits_is_noticed(tmp_path: Path) -> None:
    with crash._forks(tmp_path) as fork:
        good, calls = crash._undisturbed(tmp_path, fork)
        assert calls > 100
        assert crash._unlike(good, good, 0, "") == ""
        killed = fork([crash._train(tmp_path / "killed", tmp_path)], nth=calls // 2, below=str(tmp_path / "killed"))
        assert killed[0][0] == -9
        assert crash._unlike(good, good, 1, "octavo: error: so") == "does not resume: octavo: error: so"
        settings = (tmp_path / "run.toml").read_text().replace("batch = 2", "batch = 2\nseed = 5")
        (tmp_path / "run.toml").write_text(settings)
        other = tmp_path / "other"
        assert fork([crash._train(other, tmp_path)])[0][0] == 0
        assert crash._unlike(good, other, 0, "").startswith("other bits: ['fp8 model.")
