"""What stays in BF16 whatever the recipe, each with its reason."""

import dataclasses

import pytest
from torch import nn

from octavo.conversion import Policy
from octavo.nn import Linear

HEAD = "output head: its error goes straight into the loss"
ROUTER = "router: a small error sends a token to another expert"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head", HEAD),
        ("model.lm_head", HEAD),
        ("output", HEAD),
        ("embed", "embedding"),
        ("model.embed_tokens.projection", "embedding"),
        ("layers.3.mlp.router", ROUTER),
        ("layers.3.mlp.gate", ROUTER),
        ("layers.3.mlp.gate_proj", None),
        ("layers.3.attention.output", None),
        ("layers.0.attention.q", None),
        ("", None),
    ],
)
def test_reasons_by_name(name, reason):
    assert Policy().reason_to_keep(name, nn.Linear(64, 64)) == reason


def test_a_gate_of_an_mlp_routes_nothing():
    gate = nn.Linear(64, 64)
    assert Policy().reason_to_keep("mlp.gate", gate) == ROUTER
    assert Policy().reason_to_keep("mlp.gate", gate, in_mlp=True) is None
    assert Policy(keep={"*.gate": "mine"}).reason_to_keep("mlp.gate", gate, in_mlp=True) == "mine"


@pytest.mark.parametrize(
    ("shape", "kept"), [((31, 64), True), ((64, 31), True), ((32, 32), False), ((1, 1), True)], ids=str
)
def test_small_layers(shape, kept):
    reason = Policy().reason_to_keep("layer", nn.Linear(*shape))
    assert reason == ("fewer than 32 features" if kept else None)
    assert Policy(min_features=0).reason_to_keep("layer", nn.Linear(*shape)) is None


def test_subclasses_have_a_forward_of_their_own():
    class Lora(nn.Linear):
        pass

    reason = Policy().reason_to_keep("layer", Lora(64, 64))
    assert reason == "Lora is a subclass of nn.Linear with a forward of its own"


def test_a_layer_that_is_fp8_already_is_judged_like_any_other():
    assert Policy().reason_to_keep("layer", Linear(64, 64)) is None
    assert Policy().reason_to_keep("lm_head", Linear(64, 64)) == HEAD


def test_a_filter_sees_name_and_layer_and_has_the_last_word():
    seen = []
    policy = Policy(filter=lambda name, layer: seen.append((name, layer.out_features)) or name != "b")
    assert policy.reason_to_keep("a", nn.Linear(64, 48)) is None
    assert policy.reason_to_keep("b", nn.Linear(64, 48)) == "left out by the policy's filter"
    assert policy.reason_to_keep("lm_head", nn.Linear(64, 48)) == HEAD
    assert seen == [("a", 48), ("b", 48)]


def test_a_policy_of_ones_own():
    policy = dataclasses.replace(Policy(), keep={"first*": "because"})
    assert policy.reason_to_keep("first.layer", nn.Linear(64, 64)) == "because"
    assert policy.reason_to_keep("lm_head", nn.Linear(64, 64)) is None
    assert Policy().keep != policy.keep
