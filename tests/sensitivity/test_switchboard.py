from __future__ import annotations

import pytest
import torch
from torch import nn

import octavo
from octavo import kernels
from octavo.errors import ConfigError
from octavo.models import ModelConfig, build
from octavo.sensitivity.switchboard import switchboard


def test_inside_it_computes_as_chosen_and_afterwards_the_model_is_as_it_was(case):
    model, batches, loss = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = loss(model.eval(), batches[0])
    model.train()
    model.drop.eval()
    with switchboard(model, "tensorwise", None, 24, None) as board:
        assert list(board.layers) == ["first", "second", "last"] and not any(m.training for m in model.modules())
        with kernels.record() as ledger:
            assert torch.equal(loss(model, batches[0]), plain)
        assert not ledger.gemms
        with board.using({"second": ("fprop",), "last": ("wgrad",)}), kernels.record() as ledger:
            assert not torch.equal(loss(model, batches[0]), plain)
        assert sum(ledger.gemms.values()) == 1
        with board.using({"second": ("fprop", "dgrad"), "last": ("wgrad",)}), kernels.record() as ledger:
            loss(model, batches[0]).sum().backward()
        assert sum(ledger.gemms.values()) == 3
        assert torch.equal(loss(model, batches[0]), plain)
    assert [type(layer) for layer in (model.first, model.second, model.last)] == [nn.Linear] * 3
    assert model.training and not model.drop.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_layer_is_measured_that_is_predicted_to_gain_nothing_and_none_that_the_policy_keeps(case):
    model, _, _ = case
    policy = octavo.Policy(keep={"last": "mine"}, min_gain=100.0)
    with switchboard(model, "folded", policy, 24, None) as board:
        assert list(board.layers) == ["first", "second"]


def test_a_converted_model_is_refused(case):
    model, _, _ = case
    octavo.convert(model)
    with pytest.raises(ConfigError, match="converted already"), switchboard(model, "folded", None, 24, None):
        pass
    assert type(model.first) is octavo.nn.Linear


def test_nothing_to_localise(case):
    model, _, _ = case
    with pytest.raises(ConfigError, match="no layer in FP8"), switchboard(model, "bf16", None, 24, None):
        pass


def test_nothing_is_computed_together_that_is_switched_alone():
    model = build(ModelConfig(vocab=64, dim=32, layers=1, heads=2, ffn=64, sequence=16), 0)
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Linear)]
    with switchboard(model, "tensorwise", None, 24, None) as board:
        assert len(board.layers) == 7 and all(layer.shared is None for layer in board.layers.values())
        assert [type(m) for m in model.modules() if not isinstance(m, nn.Linear)] == kinds
