from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import kernels
from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, build
from octavo.lab.sensitivity.loss import losses
from octavo.lab.sensitivity.precision_switch import alone, choices, switchable
from octavo.recipes import load, names


def test_inside_it_computes_as_chosen_and_afterwards_the_model_is_as_it_was(case):
    model, batches, loss = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = loss(model.eval(), batches[0])
    model.train()
    model.drop.eval()
    with switchable(model, "tensorwise", None, 24, None) as switch:
        assert list(switch.layers) == ["first", "second", "last"] and not any(m.training for m in model.modules())
        with kernels.record() as ledger:
            assert torch.equal(loss(model, batches[0]), plain)
        assert not ledger.gemms
        with switch.using({"second": ("fprop",), "last": ("wgrad",)}), kernels.record() as ledger:
            assert not torch.equal(loss(model, batches[0]), plain)
        assert sum(ledger.gemms.values()) == 1
        with switch.using({"second": ("fprop", "dgrad"), "last": ("wgrad",)}), kernels.record() as ledger:
            loss(model, batches[0]).sum().backward()
        assert sum(ledger.gemms.values()) == 3
        assert torch.equal(loss(model, batches[0]), plain)
    assert [type(layer) for layer in (model.first, model.second, model.last)] == [nn.Linear] * 3
    assert model.training and not model.drop.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_rotated_forward_pass_is_switched_layer_by_layer(case):
    model, batches, loss = case
    with switchable(model.eval(), "rotated", None, 24, None) as switch:
        for choice, gemms in {
            ("fprop",): {"int8": 1},
            ("fprop", "dgrad", "wgrad"): {"int8": 1, "scaled_mm.row": 2},
        }.items():
            with switch.using({"second": choice}), kernels.record() as ledger:
                loss(model, batches[0]).sum().backward()
            assert ledger.gemms == gemms, choice


def test_a_map_inside_it_computes_as_a_converted_model_and_a_layer_as_localised(case):
    model, batches, loss = case
    only = {"base": "tensorwise", "dgrad": {"precision": "bf16"}, "wgrad": {"precision": "bf16"}}
    found = octavo.localize(copy.deepcopy(model), batches, "tensorwise", loss=loss, few=4, autocast=None)
    twin, before = copy.deepcopy(model).eval(), losses(model.eval(), batches, loss)
    octavo.convert(twin, {"base": "bf16", "modules": {"first": only, "last": only}})
    with switchable(model, "tensorwise", None, 8192, None) as switch:
        with switch.using(dict.fromkeys(("first", "last"), ("fprop",))):
            assert torch.equal(losses(model, batches, loss), losses(twin, batches, loss))
        for layer in found.layers:
            with switch.using({layer.name: ("fprop",)}):
                change = (losses(model, batches, loss) - before).mean()
            assert layer.change.mean == pytest.approx(float(change), abs=1e-7)


def test_a_layer_is_measured_that_is_predicted_to_gain_nothing_and_none_that_the_policy_keeps(case):
    model, _, _ = case
    policy = octavo.Policy(keep={"last": "mine"}, min_gain=100.0)
    with switchable(model, "folded", policy, 24, None) as switch:
        assert list(switch.layers) == ["first", "second"]


def test_a_converted_model_is_refused(case):
    model, _, _ = case
    octavo.convert(model)
    with pytest.raises(ConfigError, match="converted already"), switchable(model, "folded", None, 24, None):
        pass
    assert type(model.first) is octavo.nn.Linear


def test_nothing_to_localise(case):
    model, _, _ = case
    with pytest.raises(ConfigError, match="no layer in FP8"), switchable(model, "bf16", None, 24, None):
        pass


def test_nothing_is_computed_together_that_is_switched_alone():
    model = build(ModelConfig(vocab=64, dim=32, layers=1, heads=2, ffn=64, sequence=16), 0)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Linear)]
    with switchable(model, "tensorwise", None, 24, None) as switch:
        assert len(switch.layers) == 7 and all(layer.shared is None for layer in switch.layers.values())
        assert [type(m) for m in model.modules() if not isinstance(m, nn.Linear)] == kinds


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
