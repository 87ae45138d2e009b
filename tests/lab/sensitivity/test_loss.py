"""The two terms of a change of loss, against their definitions."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import octavo
from octavo.lab.sensitivity.loss import _together, first_order, loss_changes, losses
from octavo.lab.sensitivity.precision_switch import switchable


def nothing(doing: str, _: float) -> None:
    pass


def test_losses_of_every_sequence(case):
    model, batches, loss = case
    model.eval()
    found = losses(model, batches, loss)
    assert found.dtype == torch.float64 and found.shape == (12,)
    assert torch.equal(found[3:6], loss(model, batches[1]).double())
    assert losses(model, batches, lambda *given: loss(*given).mean()).shape == (4,)


def test_for_the_last_layer_both_terms_are_known(case):
    """The loss is its square, so the first term is 2 e d and the rest is d^2, with e the error and d FP8's change."""
    model, batches, loss = case
    model.eval()
    in_fp8 = octavo.nn.Linear(64, 32, bias=False, recipe="tensorwise")
    in_fp8.load_state_dict(model.last.state_dict())
    first, rest = [], []
    with torch.no_grad():
        for x, target in batches:
            hidden = torch.tanh(model.second(torch.tanh(model.first(x))))
            error, change = model.last(hidden) - target, in_fp8(hidden) - model.last(hidden)
            first.append((2 * error * change).double().mean((1, 2)))
            rest.append(change.double().square().mean((1, 2)))
    expected, steady = torch.cat(first), torch.cat(rest)
    with switchable(model, "tensorwise", None, 24, None) as switch:
        _, found = first_order(switch, batches, loss, nothing)
        _, changes = loss_changes(switch, batches, 2, loss, nothing, nullcontext())
    torch.testing.assert_close(found["last"], expected, rtol=1e-4, atol=1e-9)
    assert changes["last"].second_order == pytest.approx(float(steady[:6].mean()), rel=1e-2)
    assert changes["last"].mean == pytest.approx(float(expected.mean() + steady[:6].mean()), rel=1e-2)
    assert changes["last"].error == pytest.approx(float(expected.std()) / 12**0.5, rel=0.02)


def test_one_sequence_has_no_standard_error():
    one, several = torch.ones(1), torch.tensor([1.0, 3.0])
    assert _together(several, several).error == pytest.approx(2**0.5)
    assert [_together(*pair).error for pair in ((one, one), (several, one))] == [None, None]


def test_where_all_batches_are_few_it_is_the_difference_itself(case):
    model, batches, loss = case
    with switchable(model, "folded", None, 24, None) as switch:
        before, changes = loss_changes(switch, batches, 4, loss, nothing, nullcontext())
        assert before == pytest.approx(float(losses(model, batches, loss).mean()))
        for name in switch.layers:
            with switch.using({name: ("fprop",)}):
                difference = losses(model, batches, loss).mean() - before
            assert changes[name].mean == pytest.approx(float(difference), abs=1e-8)


def test_the_first_term_takes_away_the_noise(case):
    """The remainder varies far less between sequences than the change."""
    model, batches, loss = case
    with switchable(model, "tensorwise", None, 24, None) as switch:
        _, first = first_order(switch, batches, loss, nothing)
        before = losses(model, batches, loss)
        for name in switch.layers:
            with switch.using({name: ("fprop",)}):
                change = losses(model, batches, loss) - before
            assert (change - first[name]).std() < 0.4 * change.std()


def test_rows_in_place_of_sequences_are_summed_to_theirs(case):
    """A layer that is called with tokens in rows gives what it gives with sequences."""
    model, batches, loss = case
    flat = lambda model, batch: loss(lambda x: model(x.flatten(0, 1)).unflatten(0, x.shape[:2]), batch)  # noqa: E731
    with switchable(model, "tensorwise", None, 24, None) as switch:
        _, expected = first_order(switch, batches, loss, nothing)
        _, found = first_order(switch, batches, flat, nothing)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-9)


def test_a_layer_without_a_gradient_has_no_first_term(case):
    model, batches, loss = case
    for parameter in (model.scale, model.first.weight):
        parameter.requires_grad_(False)
    with switchable(model, "tensorwise", None, 24, None) as switch:
        _, found = first_order(switch, batches, loss, nothing)
        _, changes = loss_changes(switch, batches, 4, loss, nothing, nullcontext())
    assert torch.equal(found["first"], torch.zeros(12, dtype=torch.float64)) and found["second"].all()
    assert changes["first"].mean == changes["first"].second_order != 0
