"""Recommendations for given measurements: each rule's answer, and its turning point."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import octavo
from octavo.lab.pilot.judging import advise, shown_gap
from octavo.lab.pilot.measuring import allocations
from octavo.lab.pilot.report import phase_rows, speed_rows

LOSSES = [5.0, 4.5, 4.2, 4.0, 3.9, 3.8]


def lane(step_ms=100.0, losses=1.0, **more):
    return {"step_ms": step_ms, "losses": [losses * loss for loss in LOSSES], **more}


def said(pilot, about):
    return next((advice for advice in advise(pilot) if advice.about == about), None)


@pytest.mark.parametrize(("step_ms", "decision"), [(80, "yes"), (95, "yes"), (96, "not yet"), (130, "not yet")])
def test_fp8_is_adopted_from_5_percent_on(make_pilot, step_ms, decision):
    pilot = make_pilot({"bf16": lane(), "folded": lane(step_ms)})
    assert said(pilot, "adopt").decision == decision and pilot.adopts == (decision == "yes")


def test_a_speed_that_is_not_known_decides_nothing(make_pilot):
    pilot = make_pilot({"bf16": lane(None), "folded": lane(None)})
    assert said(pilot, "adopt").decision == "not known" and not pilot.adopts
    assert "no speed of folded against BF16; 1 of 2 layers" in said(pilot, "adopt").reason
    assert "folded: not known" in said(pilot, "recipe").reason


def test_the_fastest_recipe_whose_loss_follows_is_taken(make_pilot):
    found = {"bf16": lane(), "folded": lane(80), "block": lane(90), "tensorwise": lane(70, 1.02)}
    pilot = make_pilot(found)
    assert pilot.best == "folded" and "tensorwise: its loss is 2.00 % above BF16's" in said(pilot, "recipe").reason


def test_of_equally_fast_recipes_the_one_with_the_closer_loss(make_pilot):
    assert make_pilot({"bf16": lane(), "tensorwise": lane(80, 1.005), "folded": lane(81)}).best == "folded"
    assert make_pilot({"bf16": lane(), "tensorwise": lane(80), "folded": lane(81)}).best == "tensorwise"


@pytest.mark.parametrize("fault", [{"failed": "OutOfMemoryError: 3 GiB"}, {"fallbacks": ["fprop falls back"]}])
def test_a_recipe_that_fails_or_falls_back_is_not_taken(make_pilot, fault):
    pilot = make_pilot({"bf16": lane(), "folded": lane(50, **fault)})
    assert pilot.best is None and not pilot.adopts
    assert said(pilot, "adopt").decision == "no" and next(iter(fault.values()))[0] in said(pilot, "adopt").reason


def test_routing_names_layers_whose_gradient_turns(make_pilot):
    turned = lane(80, gradient_cosines={"0": 0.7}, layer_errors={"0": 0.04})
    advice = said(make_pilot({"bf16": lane(), "folded": turned}), "routing")
    assert advice.decision == "keep 0 in BF16" and "largest error of an output 4.0%, 0" in advice.reason
    straight = lane(80, gradient_cosines={"0": 0.95})
    assert said(make_pilot({"bf16": lane(), "folded": straight}), "routing").decision == "as planned"


@pytest.mark.parametrize(("resident", "peak", "largest"), [(10, 20, 64), (40, 80, 10), (50, 98, 6)])
def test_the_batch_fills_nine_tenths_of_the_memory(make_pilot, resident, peak, largest):
    pilot = make_pilot({"bf16": lane(), "folded": lane(80, resident_gib=resident, peak_gib=peak)})
    assert str(largest) in said(pilot, "batch").decision.replace(",", "").split()


def test_memory_that_is_short_asks_for_fp8_weights(make_pilot):
    short = make_pilot({"bf16": lane(), "folded": lane(80, peak_gib=95.0)})
    assert "weights='fp8'" in said(short, "policy").decision
    assert said(make_pilot({"bf16": lane(), "folded": lane(80, peak_gib=50.0)}), "policy").decision == "the default"


@pytest.mark.parametrize(
    ("idle", "data", "compiled", "decision"),
    [
        (30, 0, False, "fewer launches: torch.compile (--compile)"),
        (30, 0, True, "fewer launches: a CUDA graph"),
        (30, 20, False, "load data ahead"),
        (2, 1, False, "nothing to do"),
    ],
)
def test_the_host(make_pilot, idle, data, compiled, decision):
    found = {"bf16": lane(), "folded": lane(80, phases={"idle": idle, "data": data})}
    assert said(make_pilot(found, compiled=compiled), "host").decision == decision
    predicted = said(make_pilot(found, predicted_for="h200"), "host")
    is_launching = predicted.decision == "fewer launches: torch.compile, a CUDA graph"
    assert is_launching == (idle > 20) and (is_launching or predicted.decision == "not known here")


def test_decoding_energy_and_baseline(make_pilot):
    found = {
        "bf16": lane(decode_ms=2.0, joules_per_token=0.01),
        "fp16": lane(101),
        "folded": lane(80, decode_ms=2.5, joules_per_token=0.008),
    }
    pilot = make_pilot(found)
    assert said(pilot, "decoding").decision.startswith("by an engine")
    assert said(pilot, "energy").decision == "80% of BF16's"
    assert "fp16 0.99" in said(pilot, "baseline").reason
    found["folded"] |= {"decode_ms": 1.5, "decode_batch_ms": 3.0}
    found["bf16"]["decode_batch_ms"] = 4.0
    assert "of 8 sequences at a time 3.00 and 4.00 ms" in said(make_pilot(found), "decoding").reason
    assert said(make_pilot(found), "decoding").decision == "in FP8"


@pytest.mark.parametrize(
    ("parts", "decision"),
    [
        ({"gemm": 60, "attention": 10, "elementwise": 25, "communication": 3}, "not the bottleneck: GEMMs are"),
        ({"gemm": 20, "attention": 0, "elementwise": 25, "communication": 3}, "the bottleneck, elementwise first"),
        ({"gemm": 20, "attention": 0, "elementwise": 5, "communication": 40}, "the bottleneck, communication first"),
    ],
)
def test_where_transfers_dominate(make_pilot, parts, decision):
    advice = said(make_pilot({"bf16": lane(), "folded": lane(80, parts=parts, phases={"data": 2.0})}), "transfers")
    assert advice.decision == decision and "data 2.00" in advice.reason
    assert said(make_pilot({"bf16": lane(), "folded": lane(80)}), "transfers") is None


def test_speed_up_per_phase_and_kind_of_kernel(make_pilot):
    found = {
        "bf16": lane(phases={"forward": 30.0, "idle": 0.0}, parts={"gemm": 50.0, "quantize": 0.0}),
        "folded": lane(80, phases={"forward": 20.0, "idle": 1.0}, parts={"gemm": 25.0, "quantize": 5.0}),
    }
    pilot = make_pilot(found)
    assert pilot.speedups("folded") == {"forward": 1.5, "gemm": 2.0}
    assert phase_rows(pilot)[1] == ("forward", "30.00", "20.00", "1.50")
    assert phase_rows(pilot)[-1] == ("quantize", "0.00", "5.00", "-")


def test_what_a_step_asks_of_the_allocator():
    before = {"allocation.all.allocated": 100, "num_device_alloc": 7}
    after = {
        "allocation.all.allocated": 300, "num_device_alloc": 8,
        "reserved_bytes.all.peak": 3 * 2**30, "allocated_bytes.all.peak": 2**31,
    }  # fmt: skip
    found = allocations(before, after, 10)
    assert found == {"allocations": 20.0, "device_mallocs": 0.1, "fragmentation_gib": 1.0}


def test_a_small_time_is_not_shown_as_none(make_pilot):
    pilot = make_pilot({"bf16": lane(0.0123), "folded": lane(0.01)})
    assert [row[1] for row in speed_rows(pilot)[1:]] == ["0.012", "0.01"]


def test_reasons_are_sentences_also_with_one_layer_and_nothing_converted(make_pilot):
    pilot = make_pilot({"bf16": lane(), "folded": lane(80), "block": lane(90)})
    (kept,) = octavo.plan(torch.nn.Sequential(torch.nn.Linear(8, 8))).layers
    pilot.plans["block"] = replace(pilot.plans["block"], layers=(kept,))
    why = "fewer than 32 features"
    assert f"block: nothing converts: {why} (1 of 1 layer)" in said(pilot, "recipe").reason
    assert f"1 layer in BF16: {why}" in said(pilot, "routing").reason


def test_the_error_of_a_single_step_is_not_said_to_be_infinite():
    assert shown_gap((0.01, float("inf"))) == "+0.01 % in one step"
    assert shown_gap((-0.5, 0.25)) == "-0.50 ± 0.25 %"


def test_recipes_with_the_same_fault_are_named_together(make_pilot):
    lanes = {"bf16": lane(), **{name: lane(failed="no memory") for name in ("folded", "block")}}
    lanes["tensorwise"] = lane(failed="other")
    pilot = make_pilot(lanes)
    assert said(pilot, "adopt").reason == "folded, block: no memory; tensorwise: other"
