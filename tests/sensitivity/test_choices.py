from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.recipes import load, names
from octavo.sensitivity.choices import alone, choices

ALL = ("fprop", "dgrad", "wgrad")


def test_a_recipe_whose_gemms_are_independent_offers_every_subset():
    assert list(choices(load("tensorwise"))) == [
        (),
        ("fprop",),
        ("dgrad",),
        ("wgrad",),
        ("fprop", "dgrad"),
        ("fprop", "wgrad"),
        ("dgrad", "wgrad"),
        ALL,
    ]


def test_a_folded_product_needs_the_codes_of_fprop():
    offered = choices(load("folded"))
    assert list(offered) == [(), ("fprop",), ("fprop", "dgrad"), ("fprop", "wgrad"), ALL]
    assert alone("fprop", offered) == ((), ("fprop",))
    assert alone("wgrad", offered) == (("fprop",), ("fprop", "wgrad"))


def test_what_the_recipe_leaves_in_bf16_is_not_offered():
    assert max(map(len, choices(load("rowwise_bf16_wgrad")))) == 2


@pytest.mark.parametrize("name", names())
def test_each_choice_is_the_recipe_with_those_gemms_in_fp8(name):
    recipe = load(name)
    for choice, chosen in choices(recipe).items():
        assert tuple(gemm for gemm, *_ in chosen.gemms()) == choice
        assert all(chosen.gemm(gemm) == recipe.gemm(gemm) for gemm in choice)
    assert choices(recipe)[tuple(gemm for gemm, *_ in recipe.gemms())].name == recipe.name


def test_overrides_are_left_behind():
    recipe = load({"base": "tensorwise", "modules": {"a": "bf16"}})
    assert all(not chosen.modules for chosen in choices(recipe).values())


def test_a_gemm_that_no_choice_has():
    with pytest.raises(ConfigError, match="wgrad cannot be measured"):
        alone("wgrad", choices(load("rowwise_bf16_wgrad")))
