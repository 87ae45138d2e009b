"""Options of a policy that do nothing somewhere: the plan says so, and strict refuses."""

import json

import pytest
from torch import nn

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama

CONFIG = ModelConfig(vocab=64, dim=64, heads=4, layers=2, sequence=16, ffn=128)
OPTIONS = ("activation_inputs", "norm_inputs", "attention_output")
every_option = pytest.mark.parametrize("option", OPTIONS)


@every_option
def test_where_it_is_applied_nothing_is_said(option):
    plan = octavo.convert(Llama(CONFIG), policy=octavo.Policy(**{option: "fp8"}), strict=True)
    assert plan.unapplied == ()
    assert sum("kept in FP8" in structure.what for structure in plan.structures) == (
        5 if option == "norm_inputs" else 2
    )


@every_option
def test_a_model_without_such_a_module(option):
    model, policy = nn.Sequential(nn.Linear(64, 64)), octavo.Policy(**{option: "fp8"})
    plan = octavo.plan(model, policy=policy)
    assert len(plan.unapplied) == 1 and f"{option} = 'fp8' does nothing" in plan.unapplied[0]
    assert plan.unapplied[0] in str(plan) and json.loads(plan.to_json())["unapplied"] == list(plan.unapplied)
    with pytest.raises(UnsupportedError, match=f"{option} = 'fp8' does nothing"):
        octavo.convert(model, policy=policy, strict=True)
    octavo.convert(model, policy=policy)  # without strict it goes on


@pytest.mark.parametrize(
    ("recipe", "keep", "why"),
    [
        ("delayed", {}, "keeps scales from step to step"),
        ("rowwise_bf16_wgrad", {}, "leaves a GEMM in BF16"),
        ("folded", {"*w2": "for a test"}, "one of its layers stays in BF16"),
        ({"base": "folded", "modules": {"*w3": {"base": "block"}}}, {}, "its layers differ in their recipes"),
    ],
)
def test_an_mlp_that_is_not_computed_as_one(recipe, keep, why):
    policy = octavo.Policy(activation_inputs="fp8", keep=keep)
    plan = octavo.plan(Llama(CONFIG), recipe, policy=policy)
    assert [line.split(": ")[0].split()[-3] for line in plan.unapplied] == [
        "layers.0.feed_forward,",
        "layers.1.feed_forward,",
    ]
    assert all(why in line for line in plan.unapplied)


def test_low_memory_is_every_option_where_the_model_has_what_it_is_for():
    low = octavo.Policy(memory="low")
    assert low == octavo.Policy(memory="low", **dict.fromkeys(OPTIONS, "fp8"))
    assert str(octavo.plan(Llama(CONFIG), policy=low)) == str(
        octavo.plan(Llama(CONFIG), policy=octavo.Policy(**dict.fromkeys(OPTIONS, "fp8")))
    )
    plan = octavo.convert(nn.Sequential(nn.Linear(64, 64)), policy=low, strict=True)  # asks for what there is
    assert len(plan.unapplied) == 3
    with pytest.raises(ConfigError, match="memory = 'lowest': it is 'exact' or 'low'"):
        octavo.Policy(memory="lowest")


def test_nothing_is_said_without_the_options():
    assert octavo.plan(nn.Sequential(nn.Linear(64, 64))).unapplied == ()


@every_option
def test_values_and_contradictions_are_refused(option):
    with pytest.raises(ConfigError, match=f"{option} = 'fp16'"):
        octavo.Policy(**{option: "fp16"})
    with pytest.raises(ConfigError, match="fuse = False"):
        octavo.Policy(**{option: "fp8"}, fuse=False)
