"""Sessions of `octavo bench parity`: what one leaves undone, another does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo_bench import ladder, parity, results
from octavo_bench.cli import Output
from octavo_bench.installed_text import InstalledText
from octavo_bench.lanes import BF16, NULL
from octavo_bench.results import Row

Run = Callable[..., list[Row]]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    ids = torch.randint(9, (20_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    own = InstalledText(ids, {"python": ids[:400], "english": ids[400:700]}, "digest")
    monkeypatch.setattr(parity, "installed_text", lambda limit: own)
    monkeypatch.setattr(parity, "COMMITTED", tmp_path / "none")
    monkeypatch.setitem(ladder.SIZES, "tiny", replace(ladder.SIZES["tiny"], tokens_per_parameter=0.1))

    def run(pairs: int, recipes: str = "folded", conditions: str = "half", seeds: int = 100) -> list[Row]:
        length = parity.Session(pairs=pairs, device="cpu", seeds=seeds)
        out = Output(write=tmp_path)
        assert parity.parity(sizes="tiny", conditions=conditions, recipes=recipes, session=length, output=out) == 0
        return ladder.read_rows(tmp_path)

    return run


def figures(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_session_goes_on_where_the_last_one_stopped(session: Run, tmp_path: Path) -> None:
    first = session(2)
    assert [(row["seed"], row["recipe"]) for row in first] == [
        (s, a) for s in (100, 101) for a in (BF16, NULL, "folded")
    ]
    assert session(2) == first
    [file] = tmp_path.glob("*-ladder.json")
    cut = results.load(file)
    file.unlink()
    results.write(replace(cut, rows=cut.rows[:4]), tmp_path)  # the second block has BF16 alone
    resumed = session(2)
    assert figures(resumed) == figures(first) and resumed[:4] == first[:4]
    more = session(3)
    assert more[:6] == resumed and {row["seed"] for row in more[6:]} == {102}


def test_another_recipe_or_condition_joins_the_blocks(session: Run) -> None:
    first = session(1)
    changed = "folded+wgrad.precision=bf16"
    second = session(1, f"folded,{changed}")
    assert second[:3] == first and [row["recipe"] for row in second[3:]] == [changed]
    assert second[3]["fresh_loss"] != second[2]["fresh_loss"]
    both = session(1, conditions="half,whole,half+outliers")
    whole, hard = both[4:7], both[7:]
    assert {row["condition"] for row in whole} == {"whole"} and {row["condition"] for row in hard} == {"half+outliers"}
    assert whole[0]["fresh_loss"] == first[0]["fresh_loss"] != hard[0]["fresh_loss"]  # BF16 branched from itself
    assert whole[2]["fresh_loss"] != first[2]["fresh_loss"]


def test_bf16_alone_shows_the_spread(session: Run) -> None:
    rows = session(1, "none", "half,half+lr4")
    assert [row["recipe"] for row in rows] == [BF16, NULL] * 2
    assert [gap.arm for gap in ladder.gaps(rows[:2])] == [NULL]


def test_recipes_that_cannot_be_paired_are_refused() -> None:
    parity.check_recipes(["folded", "tensorwise+dgrad.precision=bf16"])
    with pytest.raises(ConfigError, match="no FP8 GEMM"):
        parity.check_recipes(["bf16"])
    with pytest.raises(ConfigError, match="keeps scales from step to step"):
        parity.check_recipes(["delayed"])
