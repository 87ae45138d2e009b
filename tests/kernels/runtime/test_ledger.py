"""The ledger counts what really ran: forward and backward, eager and compiled, in nested blocks."""

import logging

import pytest
import torch
from torch import nn

from octavo import kernels
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.kernels.runtime import host_state
from octavo.kernels.runtime import ledger as module
from octavo.kernels.runtime.host_state import update
from octavo.kernels.runtime.ledger import count, fall_back
from octavo.nn import Linear

ROW, TENSOR = ("reference",) * 2 if cpu_unsupported_reason() else ("scaled_mm.row", "scaled_mm.tensor")
PER_STEP = {
    "folded": {ROW: 3},
    "rowwise": {ROW: 3},
    "tensorwise": {TENSOR: 3},
    "block": {"reference": 3},
    "bf16": {},
}


def step(layer: nn.Module) -> None:
    layer(torch.randn(8, 64, requires_grad=True)).sum().backward()


@pytest.fixture(autouse=True)
def nothing_open():
    assert host_state.now.ledgers == ()
    yield
    left = host_state.now.ledgers
    update(lambda state: state._replace(ledgers=()))
    module._warned.clear()
    assert left == (), "a ledger was left open"


@pytest.mark.parametrize("recipe", PER_STEP)
def test_forward_and_backward_are_counted(recipe):
    layer = Linear(64, 32, recipe=recipe)
    with kernels.record() as ledger:
        step(layer)
    assert ledger.gemms == PER_STEP[recipe]
    assert ledger.fallbacks == []  # a CPU has nothing faster to fall back from


@pytest.mark.parametrize("recipe", ["folded", "block"])
def test_compiled_code_is_counted_every_time_it_runs(recipe):
    layer = Linear(64, 32, recipe=recipe)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with kernels.record() as ledger:
        step(compiled)
        step(compiled)
    assert ledger.gemms == {kernel: 2 * times for kernel, times in PER_STEP[recipe].items()}
    torch._dynamo.reset()


def test_warnings_are_held(caplog):
    with module.hold_warnings() as held:
        module.warn_once("of a model that is only tried")
    assert held == ["of a model that is only tried"] and not caplog.records
    module.warn_once(held[0])
    assert [record.getMessage() for record in caplog.records] == held


def test_nothing_is_counted_outside():
    layer = Linear(64, 32)
    with kernels.record() as ledger:
        pass
    step(layer)
    assert not ledger.gemms


def test_nested_blocks_each_see_what_ran_inside_them():
    layer = Linear(64, 32)
    with kernels.record() as outer:
        step(layer)
        with kernels.record() as inner:
            step(layer)
        step(layer)
    assert outer.gemms == {ROW: 9}
    assert inner.gemms == {ROW: 3}


def test_nested_blocks_that_have_seen_the_same_are_not_mixed_up():
    # Both are empty when the inner one closes: it is the inner one that must close.
    layer = Linear(64, 32)
    with kernels.record() as outer:
        with kernels.record() as inner:
            pass
        step(layer)
    assert outer.gemms == {ROW: 3}
    assert not inner.gemms


def test_a_block_closes_when_an_exception_leaves_it():
    with pytest.raises(ZeroDivisionError), kernels.record():
        raise ZeroDivisionError
    assert host_state.now.ledgers == ()


def test_count_enters_every_open_ledger():
    with kernels.record() as outer, kernels.record() as inner:
        count("a")
        count("a")
        count("b")
    assert outer.gemms == inner.gemms == {"a": 2, "b": 1}


def test_rule_7_a_fallback_is_entered_once_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "octavo"), kernels.record() as ledger:
        fall_back("no kernel")
        fall_back("no kernel")
        fall_back("too small")
    assert ledger.fallbacks == ["no kernel", "too small"]
    assert [record.getMessage() for record in caplog.records] == ["FP8 fallback: no kernel", "FP8 fallback: too small"]


def test_rule_7_a_fallback_is_logged_even_when_nobody_records(caplog):
    with caplog.at_level(logging.WARNING, "octavo"):
        fall_back("no kernel")
    assert len(caplog.records) == 1


def test_frozen_and_input_without_gradient_run_fewer_gemms():
    layer = Linear(64, 32)
    with kernels.record() as ledger:
        layer(torch.randn(8, 64)).sum().backward()
    assert ledger.gemms == {ROW: 2}, "no dgrad"
    layer.weight.requires_grad_(False)
    with kernels.record() as ledger:
        layer(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert ledger.gemms == {ROW: 2}, "no wgrad"
    with kernels.record() as ledger, torch.no_grad():
        layer(torch.randn(8, 64))
    assert ledger.gemms == {ROW: 1}
