"""The rungs of each recipe, climbing and coming down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo.lab.guard.ladder import EVERYTHING, Ladder
from octavo.recipes import load

RUNGS = {
    "tensorwise": ["tensorwise", "folded", "block", "bf16"],
    "delayed": ["delayed", "delayed+2bits", "folded", "block", "bf16"],
    "just_in_time": ["just_in_time", "just_in_time+2bits", "folded", "block", "bf16"],
    "static": ["static", "folded", "block", "bf16"],
    "folded": ["folded", "block", "bf16"],
    "rowwise": ["rowwise", "block", "bf16"],
    "rotated": ["rotated", "rotated, fprop in FP8", "block", "bf16"],
    "block": ["block", "bf16"],
    "mxfp8": ["mxfp8", "bf16"],
    "bf16": ["bf16"],
}


@pytest.mark.parametrize("name", RUNGS)
def test_rungs(name: str) -> None:
    assert [recipe.name for recipe in Ladder(load(name), 10).rungs("a")] == RUNGS[name]


def test_a_wider_window_has_more_headroom() -> None:
    assert Ladder(load("delayed"), 10).rungs("a")[1].history.margin == load("delayed").history.margin + 2


@pytest.mark.parametrize(("is_flushed", "after"), [(False, "delayed+2bits"), (True, "folded")])
def test_a_layer_whose_codes_are_flushed_gets_no_headroom(is_flushed: bool, after: str) -> None:
    ladder = Ladder(load("delayed"), 10)
    move = ladder.up("a", 5, is_flushed=is_flushed)
    assert move is not None and move.after == after
    again = Ladder(load("delayed"), 10)
    again.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert again.recipe().modules["a"].name == after
    assert [move.after for move in again.down(15)] == ["delayed"]


def test_a_layer_climbs_to_bf16_and_no_further() -> None:
    ladder = Ladder(load("folded"), 10)
    assert ladder.recipe() == load("folded")
    assert [tuple(move)[1:] for _ in range(2) if (move := ladder.up("a", 5))] == [
        ("folded", "block"),
        ("block", "bf16"),
    ]
    assert ladder.up("a", 5) is None
    assert {name: recipe.name for name, recipe in ladder.recipe().modules.items()} == {"a": "bf16"}


def test_a_layer_starts_from_its_own_recipe() -> None:
    ladder = Ladder(replace(load("tensorwise"), modules={"a*": load("block")}), 10)
    assert [recipe.name for recipe in ladder.rungs("ab")] == ["block", "bf16"]
    ladder.up("ab", 1)
    ladder.up("b", 1)
    modules = {name: recipe.name for name, recipe in ladder.recipe().modules.items()}
    assert modules == {"a*": "block", "ab": "bf16", "b": "folded"}
    assert next(iter(modules)) == "a*"  # the last match wins


def test_a_layer_that_an_earlier_pattern_names_is_moved() -> None:
    ladder = Ladder(replace(load("tensorwise"), modules={"a": load("rowwise"), "*": load("block")}), 10)
    ladder.up("a", 1)
    assert ladder.recipe().for_layer("a").name == "bf16" and ladder.recipe().for_layer("b").name == "block"


def test_everything_wins_over_what_was_moved_alone() -> None:
    ladder = Ladder(load("block"), 10)
    ladder.up(EVERYTHING, 1)
    ladder.up("a", 2)
    assert [*ladder.recipe().modules] == ["a", EVERYTHING]


def test_it_comes_down_rung_by_rung_and_waits_longer_after_a_relapse() -> None:
    ladder = Ladder(load("folded"), 10)
    ladder.up("a", 0)
    ladder.up("a", 1)
    assert ladder.down(10) == []
    assert [tuple(move) for move in ladder.down(11)] == [("a", "bf16", "block")]
    assert ladder.down(20) == []
    assert [tuple(move) for move in ladder.down(21)] == [("a", "block", "folded")]
    assert ladder.recipe() == load("folded")
    ladder.up("a", 25)
    assert ladder.down(44) == []
    assert len(ladder.down(45)) == 1


def test_standings_go_into_a_checkpoint() -> None:
    ladder = Ladder(load("folded"), 10)
    ladder.up("a", 3)
    again = Ladder(load("folded"), 10)
    again.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert again.recipe() == ladder.recipe()
    assert again.down(13) == ladder.down(13) != []
