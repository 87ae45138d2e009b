"""The recipe where a user names none: rotated, or folded, said, for all that rotated refuses."""

import json
import re

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, build


def layers():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def mixture():
    config = ModelConfig(architecture="moe", vocab=64, dim=32, layers=1, heads=2, ffn=32, experts=4, sequence=8)
    return build(config, 0)


@pytest.fixture
def said(monkeypatch):
    """What `convert` warns of."""
    found = []
    monkeypatch.setattr("octavo.conversion.apply.warn_once", found.append)
    return found


def test_without_a_name_a_model_is_converted_to_the_default(said):
    model = layers()
    plan = octavo.convert(model)
    assert plan.recipe == recipes.load(recipes.DEFAULT) == recipes.load("rotated") and plan.instead == ""
    assert {layer.recipe.name for layer in model} == {"rotated"} and said == []
    assert str(octavo.plan(layers())) == str(octavo.plan(layers(), "rotated")) == str(plan)


@pytest.mark.parametrize(
    ("make", "policy", "device", "why"),
    [
        (layers, octavo.Policy(weights="fp8"), None, "weights stored in FP8 have no INT8 codes"),
        (mixture, None, None, r"engines rotate the inputs of linear layers, not of experts \(.*layers\.0"),
        *((layers, None, gpu, "INT8 GEMM does not run on this GPU") for gpu in ("b200", "mi355x", "a100")),
        (layers, None, "l40s", "INT8 GEMM compiles for Ada, but was not run there"),
    ],
)
def test_where_the_default_is_refused_the_plan_says_why_above_its_table(make, policy, device, why):
    plan = octavo.plan(make(), policy=policy, device=device)
    assert plan.recipe == recipes.load(recipes.FALLBACK) == recipes.load("folded")
    assert re.fullmatch(f"recipe 'folded' in place of the default, 'rotated': .*{why}.*", plan.instead)
    assert plan.instead in str(plan).partition("\n\n")[0].splitlines()
    assert json.loads(plan.to_json())["instead"] == plan.instead


def test_convert_says_it_too_and_computes_what_folded_does(said):
    model, other, x = layers(), layers(), torch.randn(8, 64)
    other.load_state_dict(model.state_dict())
    policy = octavo.Policy(weights="fp8")
    plan = octavo.convert(model, policy=policy)
    octavo.convert(other, "folded", policy=policy)
    assert said == [f"octavo.convert: {plan.instead}"]
    assert torch.equal(model(x), other(x))
    assert octavo.convert(model).recipe.name == "folded"  # converted again: its weights are in FP8 still


def test_a_recipe_that_is_named_is_refused_as_ever(said):
    with pytest.raises(ConfigError, match="recipe 'rotated' of '0' cannot compute with codes that are made once"):
        octavo.convert(layers(), "rotated", policy=octavo.Policy(weights="fp8"))
    assert octavo.convert(mixture(), "rotated").instead == ""
    assert octavo.plan(layers(), "folded", policy=octavo.Policy(weights="fp8")).instead == "" and said == []


def test_experts_that_stay_in_bf16_do_not_decide():
    assert octavo.plan(mixture(), policy=octavo.Policy(keep=["*.experts"])).recipe.name == "rotated"


def test_localize_measures_the_recipe_that_convert_would_take():
    batches = [torch.randn(4, 64)]
    found = octavo.localize(layers(), batches, loss=lambda model, x: model(x).square().mean(), autocast=False)
    assert found.recipe.name == "rotated"
