from __future__ import annotations

import pytest
import torch

from octavo.conversion.gain import predicted_gain
from octavo.kernels.devices import H200
from octavo.recipes import load
from octavo.sensitivity import times
from octavo.sensitivity.precision_switch import switchable


def test_calls_are_those_of_training(case):
    model, batches, loss = case
    with switchable(model, "tensorwise", None, 24, None) as switch:
        calls = times.calls_of(switch, batches[0], loss, torch.bfloat16, None)
        assert calls["first"] == times.Call((3, 8, 48), torch.float32, True, 24)
        assert calls["second"] == times.Call((3, 8, 64), torch.bfloat16, True, 24)
        longer = times.calls_of(switch, batches[0], loss, None, 4096)
        assert longer["second"] == times.Call((4096, 64), torch.float32, True, 4096)


def test_predicted_ms_are_those_of_the_gain(case):
    model, batches, loss = case
    recipe = load("tensorwise")
    with switchable(model, recipe, None, 24, None) as switch:
        calls = times.calls_of(switch, batches[0], loss, None, 8192)
        ms = times.predicted(switch, calls)["second"]
    assert ms[()] / ms["fprop", "dgrad", "wgrad"] == pytest.approx(predicted_gain(recipe, 64, 64, 8192, rates=H200))
    assert ms[()] == pytest.approx(3 * 2 * 8192 * 64 * 64 / 670e12 * 1e3)


def test_measured_for_every_choice_and_once_for_layers_alike(case):
    model, batches, loss = case
    told = []
    with switchable(model, "folded", None, 24, None) as switch:
        switch.layers["again"], switch.offered["again"] = switch.layers["second"], switch.offered["second"]
        calls = times.calls_of(switch, batches[0], loss, None, None)
        calls["again"] = calls["second"]
        ms = times.measured(switch, calls, torch.bfloat16, lambda doing, _: told.append(doing))
    assert told == ["time, first", "time, second", "time, last"]
    assert set(ms["last"]) == set(switch.offered["last"]) and min(ms["last"].values()) > 0
    assert ms["again"] is ms["second"] and all(p.grad is None for p in model.parameters())
