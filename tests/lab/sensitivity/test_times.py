from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.conversion.gain import predicted_gain, predicted_ms
from octavo.kernels.runtime.devices import H200
from octavo.lab.sensitivity import times
from octavo.lab.sensitivity.precision_switch import switchable
from octavo.recipes import load


def test_calls_are_those_of_training(case):
    model, batches, loss = case
    with switchable(model, "tensorwise", None, 24, None) as switch:
        calls = times.calls_of(switch, batches[:1], loss, torch.bfloat16, None)
        assert calls["first"] == times.Call((3, 8, 48), torch.float32, True, 24)
        assert calls["second"] == times.Call((3, 8, 64), torch.bfloat16, True, 24)
        longer = times.calls_of(switch, batches[:1], loss, None, 4096)
        assert longer["second"] == times.Call((4096, 64), torch.float32, True, 4096)


def test_predicted_ms_are_those_of_the_gain(case):
    model, batches, loss = case
    recipe = load("tensorwise")
    with switchable(model, recipe, None, 24, None) as switch:
        calls = times.calls_of(switch, batches[:1], loss, None, 8192)
        ms = times.predicted(switch, calls)["second"]
    assert ms[()] / ms["fprop", "dgrad", "wgrad"] == pytest.approx(predicted_gain(recipe, 64, 64, 8192, rates=H200))
    assert ms[()] == pytest.approx(3 * 2 * 8192 * 64 * 64 / 670e12 * 1e3)


def test_measured_for_every_choice_and_once_for_layers_alike(case):
    model, batches, loss = case
    told = []
    with switchable(model, "folded", None, 24, None) as switch:
        switch.layers["again"], switch.offered["again"] = switch.layers["second"], switch.offered["second"]
        calls = times.calls_of(switch, batches[:1], loss, None, None)
        calls["again"] = calls["second"]
        ms = times.measured(switch, calls, torch.bfloat16, lambda doing, _: told.append(doing))
    assert told == ["time, first", "time, second", "time, last"]
    assert set(ms["last"]) == set(switch.offered["last"]) and min(ms["last"].values()) > 0
    assert ms["again"] is ms["second"] and all(p.grad is None for p in model.parameters())


def test_layers_that_the_first_batch_does_not_call_are_looked_for_in_the_next(case):
    model, batches, loss = case

    def skipping(model, batch):
        return loss(model, batch) if batch is batches[2] else model.first(batch[0]).mean((1, 2))

    with switchable(model, "tensorwise", None, 24, None) as switch:
        assert [*times.calls_of(switch, batches[:2], skipping, None, None)] == ["first"]
        assert [*times.calls_of(switch, batches, skipping, None, None)] == ["first", "second", "last"]


@pytest.mark.parametrize("sizes", [(64, 256), (256, 64)])
def test_a_layer_stored_as_k_by_n_has_the_times_of_the_same_linear_layer(sizes):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    n, k = sizes
    batches, found = [(torch.randn(8, 16, k),)], []
    for layer in (nn.Linear(k, n), conv1d(n, k)):
        model = nn.Sequential(layer)
        with switchable(model, "folded", None, 128, None) as switch:
            calls = times.calls_of(switch, batches, lambda model, batch: model(*batch).mean(), None, None)
            found.append((calls, times.predicted(switch, calls)))
    assert found[0] == found[1] and found[0][0]["0"].rows == 128


def test_experts_are_timed_by_their_rows(mixture):
    model, batches, loss = mixture
    recipe = load("folded")
    with switchable(model, recipe, None, 24, None) as switch:
        calls = times.calls_of(switch, batches, loss, torch.bfloat16, None)
        up, down = "experts.gate_up_gemm", "experts.down_gemm"
        assert [*calls] == ["first", up, down, "last"]
        assert calls[up].shape == (64, 64) and calls[down].shape == (64, 32) and calls[up].rows == 64
        assert calls[up].needs_gradient and calls["first"].rows == 32
        grown = times.calls_of(switch, batches, loss, None, 4096)
        assert grown[down].shape == (8192, 32) and grown[down].rows == 8192 and grown["last"].rows == 4096
        rates = H200._replace(row=H200.grouped)
        ms = times.predicted(switch, grown)[down]
        assert ms["fprop", "dgrad", "wgrad"] == 4 * predicted_ms(recipe, 64, 32, 2048, rates=rates)
        measured = times.measured(switch, {up: calls[up]}, torch.bfloat16, lambda *_: None)
        assert min(measured[up].values()) > 0 and {*measured[up]} == {*switch.offered[up]}
        assert "multiply" not in vars(switch.layers[up])
    assert all(p.grad is None for p in model.parameters())


def test_experts_have_rows_spread_evenly():
    assert times.balanced(10, 4).tolist() == [2, 5, 7, 10] and times.balanced(1, 2).dtype == torch.int32
