"""The benchmark of experts: each row has its figures, and one that fails does not end the others."""

import pytest
from torch import nn

from octavo import Policy, convert
from octavo_bench import moe


def test_rows_of_a_layer(monkeypatch):
    monkeypatch.setattr(moe, "WAYS", (moe.Way(moe.RIVAL), moe.Way("octavo", "folded"), moe.Way("wrong", "tensorwise")))
    rival, ours, wrong = moe.bench_layers(moe.SMALL, "cpu", 1)
    assert all(moe.KIND.keys.keys() <= row.keys() and row["ratio_to_bf16"] > 0 for row in (rival, ours))
    assert rival["ratio_to_bf16"] == 1.0 and ours["kept_mib"] <= rival["kept_mib"]
    assert "Grouped GEMMs have a scale per row" in wrong["error"]


def test_ratios_are_to_the_fastest_bf16(monkeypatch):
    times = iter([{"ms": 4.0}, {"ms": 2.0}, {"ms": 1.0}])
    monkeypatch.setattr(moe, "WAYS", (moe.Way(moe.RIVAL), moe.Way(f"{moe.RIVAL}, compiled"), moe.Way("octavo")))
    monkeypatch.setattr(moe, "_measure", lambda *given: next(times))
    rows = [*moe.bench_layers(moe.SMALL, "cpu", 1)]
    assert [row["ratio_to_bf16"] for row in rows] == [0.5, 1.0, 2.0]


def test_activations_as_large_as_a_weight_are_no_codes_of_it():
    shape = moe.Shape(64, 32, 4, 2, 128)  # 2 x 128 rows of 32: as many codes of gate as down has
    module = moe.Mixture(shape, "cpu")
    convert(nn.ModuleDict({"experts": module}), "folded", policy=Policy(min_gain=0, activation_inputs="fp8"))
    kept = moe._kept(module, moe._inputs(shape, "cpu"))
    assert kept["kept_weight_codes_mib"] == round(sum(p.numel() for p in module.parameters()) / 2**20, 3)


@pytest.mark.parametrize("mode", moe.MODES)
def test_ratios_of_the_trainer_are_to_bf16_of_the_same_mode(monkeypatch, mode):
    asked = []
    times = iter([{"ms": 4.0}, {"ms": 3.2}, {"ms": 2.0}])
    monkeypatch.setattr(moe, "_train", lambda *given: asked.append(given) or next(times))
    rows = [*moe.bench_trainer("cpu", "folded", mode)]
    assert asked == [("cpu", precision, mode) for precision in ("bf16", "folded", "folded + fp8 head")]
    assert [row["ratio_to_bf16"] for row in rows] == [1.0, 1.25, 2.0]
    assert all(row["implementation"].endswith(f", {moe.MODES[mode]}") for row in rows)


def test_the_trainer_of_the_experts_is_that_of_the_other_models():
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    rows = [*moe.bench_trainer("cpu", "folded", "trainer")]
    assert [row["implementation"] for row in rows] == ["bf16, eager", "folded, eager", "folded + fp8 head, eager"]
    assert rows[0]["fp8_share"] == 0.0 < rows[1]["fp8_share"] < rows[2]["fp8_share"]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.01)
