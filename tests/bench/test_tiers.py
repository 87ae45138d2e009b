"""The bench of optimizer states trains a run a tier and seed, and sets each beside FP32's of the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.optim import states_named
from octavo_bench import results
from octavo_bench.study import run_all
from octavo_bench.tiers import TIERS, by_tier, jobs


@pytest.fixture(scope="module")
def study(
    tmp_path_factory: pytest.TempPathFactory, write_text: Callable[[Path], Path]
) -> tuple[list[dict[str, Any]], Path]:
    """Return the rows of two tiers with one seed, and their directory."""
    folder = tmp_path_factory.mktemp("tiers")
    text = write_text(folder / "text")
    flags = "--preset tiny --model.layers 1 --eval-tokens 512 --steps 4 --log-every 1 --device cpu"
    shared = [*flags.split(), "--source", str(text), "--cache", str(folder / "cache")]
    chosen = jobs(["fp32", "fp8-min, all"], [0])
    rows = run_all(chosen, shared, out=folder / "out", slots=2, report=lambda line: None)
    return rows, folder / "out"


def test_each_row_is_a_run_with_its_storage(study: tuple[list[dict[str, Any]], Path]) -> None:
    rows, out = study
    assert [(row["states"], row["seed"]) for row in rows] == [("fp32", 0), ("fp8-min, all", 0)]
    kept = json.loads((out / "fp8-min-all-0" / "config.json").read_text())
    assert (kept["run"]["weights"], kept["optimizer"]["states"], kept["optimizer"]["gradients"]) == (
        "fp8",
        "fp8-min",
        "fp8",
    )
    results.Result(kind="tiers", date="2026-11-21", hardware="x", versions={}, command="c", rows=tuple(rows))


def test_the_gap_is_to_fp32_of_the_same_seed(study: tuple[list[dict[str, Any]], Path]) -> None:
    fp32, fp8 = study[0]
    assert "gap" not in fp32 and fp8["gap_95"] > 0
    assert fp8["gap"] == pytest.approx(fp8["heldout_loss"] - fp32["heldout_loss"], abs=1e-6) != 0


def test_every_tier_can_be_trained() -> None:
    for flags in TIERS.values():
        states_named(flags[flags.index("--states") + 1])
    assert {states_named(flags[-1]).name for flags in TIERS.values()} == {"fp32", "exact", "fp8-lm", "fp8", "fp8-min"}


def test_an_unknown_tier_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fp8-min'"):
        jobs(["fp8-mini"], [0])


def test_the_table_shows_seeds_gaps_and_the_spread() -> None:
    keys = ("states", "seed", "heldout_loss")
    rows = [dict(zip(keys, r, strict=True)) for r in (("fp32", 0, 0.5), ("fp32", 1, 0.51), ("fp8", 0, 0.501))]
    rows[-1] |= {"gap": 0.001, "gap_95": 0.0005}
    text = by_tier([row | {"model": "llama-129m", "tokens": 104_857_600} for row in rows])
    assert "| fp32 | 0.5000 | 0.5100 | 0.5050 |  |  |" in text
    assert "| fp8 | 0.5010 |  | 0.5010 | +0.20 % | ± 0.100 % |" in text
    assert "The 2 seeds of `fp32` lie 0.0100 apart." in text
