"""Rows of telemetry in the order of a step, and the first that differs."""

from __future__ import annotations

from loops import ROWS, telemetry

from octavo.lab.guard.telemetry_rows import first_difference, forward_first, worst_layers


def test_rows_are_read_as_a_step_makes_them() -> None:
    assert [ROWS[i] for i in forward_first(ROWS)] == [
        ("a", "input"), ("a", "weight"), ("b", "input"), ("b", "weight"), ("b", "grad_output"), ("a", "grad_output"),
    ]  # fmt: skip


def test_the_first_difference_is_where_a_fault_struck() -> None:
    before = telemetry()
    assert first_difference(ROWS, before, telemetry(b_input_amax=1.9)) is None
    assert first_difference(ROWS, before, telemetry(b_input_amax=2.1, a_grad_output_amax=9.0)) == ("b", "input")
    assert first_difference(ROWS, telemetry(a_weight_nonfinite=0.1), before) == ("a", "weight")


def test_the_worst_layer_is_first() -> None:
    assert worst_layers(ROWS, None) == []
    assert worst_layers(ROWS, telemetry()) == []
    assert worst_layers(ROWS, telemetry(a_input_flushed=0.5, b_input_saturated=0.1)) == ["b", "a"]
    assert worst_layers(ROWS, telemetry(a_input_nonfinite=0.001, b_input_saturated=1.0)) == ["a", "b"]
