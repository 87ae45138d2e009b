"""Steps that are skipped for gradients that are not finite: who hears of it, and when it is an error."""

import copy
import io
import warnings

import pytest
import torch
from network import backward, model
from torch import nn

from octavo.errors import ConfigError, NonFiniteError
from octavo.optim import AdamW, Lion, Muon


def step(optimizer, net, broken=False, value=torch.nan):
    optimizer.zero_grad()
    backward(net, 0)
    if broken:
        net[2].weight.grad[3, 5] = value
    optimizer.step()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("settings", [{}, {"clip": 1.0, "skip_nonfinite": False}], ids=["by itself", "by clipping"])
@pytest.mark.parametrize("make", [AdamW, Lion, Muon])
def test_a_skipped_step_is_said_once_and_counted(make, settings, value):
    net = model()
    optimizer = make(net.named_parameters(), lr=1e-3, **settings)
    with pytest.warns(UserWarning, match=r"step was skipped.*of '2\.weight' are not finite.*max_skips") as said:
        for broken in (False, True, True, False, True):
            step(optimizer, net, broken, value)
    assert len(said) == 1 and int(optimizer.skipped) == 3 and optimizer.skipped_in_a_row == 1
    assert said[0].filename == __file__


def test_too_many_in_a_row_are_an_error():
    net = model()
    optimizer = AdamW(net.named_parameters(), max_skips=3)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.warns(UserWarning, match="skipped"):
        for broken in (True, True):
            step(optimizer, net, broken)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*max_skips=3.*'2\.weight'"):
        step(optimizer, net, True)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    step(optimizer, net)
    assert optimizer.skipped_in_a_row == 0
    for broken in (True, True, False, True, True):
        step(optimizer, net, broken)
    assert int(optimizer.skipped) == 7


def test_stored_gradients_are_named_too():
    net = model(torch.bfloat16)
    optimizer = AdamW(net.named_parameters(), gradients="fp8")
    with pytest.warns(UserWarning, match=r"of '0\.weight', '0\.bias', '2\.weight' and 1 more are"):
        backward(net, 0, scale=torch.nan)
        optimizer.step()


def test_released_gradients_are_counted_by_step():
    net = model()
    optimizer = AdamW(net.named_parameters(), release=True, max_skips=2)
    with pytest.warns(UserWarning, match="gradients are not finite"):
        backward(net, 0, scale=torch.nan)
        optimizer.step()
    assert int(optimizer.skipped) == 4 and optimizer.skipped_in_a_row == 1
    backward(net, 0, scale=torch.nan)
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        optimizer.step()


def test_overflows_of_a_scaler_are_its_own_matter():
    net = model()
    optimizer = AdamW(net.named_parameters(), max_skips=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for broken in (True, False):
            optimizer.zero_grad()
            scaler.scale(backward(net, 0, scale=torch.inf if broken else 1.0))
            scaler.step(optimizer)
            scaler.update()
    assert int(optimizer.skipped) == 1


def test_a_copy_counts_from_there():
    net = model()
    optimizer = AdamW(net.named_parameters(), max_skips=3)
    with pytest.warns(UserWarning, match="skipped"):
        step(optimizer, net, True)
    with io.BytesIO() as file:
        torch.save((net, optimizer), file)
        file.seek(0)
        pickled = torch.load(file, weights_only=False)
    for twin, again in (copy.deepcopy((net, optimizer)), pickled):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(again, twin)
        assert again.skipped_in_a_row == 0 and int(again.skipped) == 1 and again.max_skips == 3


def test_a_pickle_of_an_older_version_has_no_limit():
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    state = optimizer.__getstate__()
    del state["max_skips"]
    older = AdamW.__new__(AdamW)
    older.__setstate__(state)
    assert older.max_skips is None and older.skipped_in_a_row == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_none(limit):
    with pytest.raises(ConfigError, match="max_skips"):
        AdamW([nn.Parameter(torch.ones(2))], max_skips=limit)
