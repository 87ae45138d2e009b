"""Plans: recipes, resolved."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from octavo.errors import ConfigError
from octavo.recipes import LinearPlan, Transposed, load, names, operands, plan_by


def test_recipes_with_equal_gemms_have_one_plan() -> None:
    folded = load("folded")
    assert replace(folded, name="mine").plan is folded.plan is plan_by(folded.plan.key)
    assert load("rowwise").plan is not folded.plan
    fast = replace(folded, fprop=replace(folded.fprop, accumulate="fast"))
    assert fast.plan is not folded.plan and fast.plan.accumulate == ("fast", "slow", "slow")


@pytest.mark.parametrize("name", names())
def test_copies_and_files_of_a_recipe_have_its_plan(name: str) -> None:
    recipe = load(name)
    for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe and other.plan is recipe.plan
    assert b"_plan" not in pickle.dumps(recipe)


@pytest.mark.parametrize("name", names())
def test_a_plan_says_what_the_recipe_says(name: str) -> None:
    recipe, plan = load(name), load(name).plan
    for back, operand, gemm in (
        (plan.w_back, "dgrad.weight", recipe.dgrad),
        (plan.x_back, "wgrad.input", recipe.wgrad),
    ):
        assert (back is Transposed.VALUES) == (not gemm.is_fp8)
        assert (back is Transposed.FOLDED) == recipe.folds(operand)
        assert (back in (Transposed.CODES, Transposed.FOLDED)) >= recipe.reuses(operand)
    assert (plan.x is None) == (plan.w is None) == (not recipe.fprop.is_fp8)
    assert (plan.x_stored is None) == (recipe.stored_scale("input") is None)
    assert (plan.x_second is None) == (recipe.second("input") is None)
    assert isinstance(plan, LinearPlan)
    assert not plan.requantises_exactly or plan.x_back is Transposed.FOLDED


def test_a_plan_is_made_of_its_key_as_that_of_an_exported_program() -> None:
    mine = replace(load("rowwise"), dgrad=replace(load("rowwise").dgrad, accumulate="fast"))
    elsewhere = operands._Plans()
    for recipe in (mine, *map(load, names())):
        assert elsewhere[recipe.plan.key] is recipe.plan


@pytest.mark.parametrize("key", ["rowwise", "(Fprop(), 1)", "(Fprop(of='x'), 1, 2, 3)", "(", "", "exit()"])
def test_a_key_that_is_no_plan_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="export the program again"):
        plan_by(key)
