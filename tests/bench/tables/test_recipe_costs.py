"""The tables of what recipes compute with: one line or table for every preset, and one worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from octavo import recipes
from octavo.recipes.presets import PRESETS
from octavo_bench import facts as recipe_costs


def test_every_recipe_is_in_both_tables() -> None:
    operands, summary = recipe_costs.operand_tables(), recipe_costs.summary_table()
    titles = [line for line in operands.splitlines() if line.startswith("**")]
    assert sorted(name for title in titles for name in title.strip("*").split(", ")) == sorted(
        f"`{name}`" for name in recipes.names()
    )
    assert [line.split(" | ")[0] for line in summary.splitlines()[2:]] == [f"| `{name}`" for name in recipes.names()]


def test_recipes_that_make_the_same_operands_share_a_table() -> None:
    assert "**`folded`, `folded_fast`**" in recipe_costs.operand_tables()


def test_folded() -> None:
    assert "| `folded` | 5.00 | 6.00 | 7.00 | 1.00 | 1.00 |" in recipe_costs.summary_table()
    lines = (
        recipe_costs.operand_tables().partition("**`folded`, `folded_fast`**\n\n")[2].partition("\n\n")[0].splitlines()
    )
    assert lines[2:] == [
        "| `fprop.input` | E4M3 | row | a power of two | quantised in forward | 2.00 | 1.00 |",
        "| `fprop.weight` | E4M3 | row | a power of two | quantised in forward | 4.00 | 1.00 |",
        "| `dgrad.grad_output` | E4M3 | row | a power of two "
        "| quantised in backward, times the scales of weight | 4.00 | 1.00 |",
        "| `dgrad.weight` | E4M3 | column | a power of two "
        "| codes of fprop, transposed in backward; its scales go into grad_output | 1.00 | 1.00 |",
        "| `wgrad.grad_output` | E4M3 | row | a power of two "
        "| quantised in the same read, times the scales of input |  | 1.00 |",
        "| `wgrad.input` | E4M3 | column | a power of two "
        "| codes of fprop, transposed in backward; its scales go into grad_output | 1.00 | 1.00 |",
    ]


def test_bf16_and_kept_scales() -> None:
    text = recipe_costs.operand_tables()
    assert "| `wgrad.input` | BF16 |  |  | as it is |  |  |" in text
    assert "| `fprop.weight` | BF16 |  |  | cast in forward | 4.00 | 2.00 |" in text
    assert "| `fprop.input` | E4M3 | tensor | FP32, delayed | quantised in forward | 2.00 | 1.00 |" in text


def test_a_new_preset_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    base = recipes.load("block")
    gradient = dataclasses.replace(base.wgrad.grad_output, rounding="stochastic")
    mine = dataclasses.replace(base, name="mine", wgrad=dataclasses.replace(base.wgrad, grad_output=gradient))
    monkeypatch.setitem(PRESETS, "mine", lambda: mine)
    assert "**`mine`**" in recipe_costs.operand_tables() and "| `mine` |" in recipe_costs.summary_table()
    assert (
        "| `wgrad.grad_output` | E4M3, stochastic | 1x128 | a power of two | quantised in backward | 2.00 | 1.03 |"
        in (recipe_costs.operand_tables())
    )
