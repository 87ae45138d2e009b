"""The whole of it: a model in, a map out, and what convert makes of that."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError, NonFiniteError
from octavo.lab.sensitivity import times
from octavo.lab.sensitivity.localisation import parse_budget

MS = {(): 1.0, ("fprop",): 0.9, ("dgrad",): 0.8, ("wgrad",): 0.7, ("fprop", "dgrad"): 0.7, ("fprop", "wgrad"): 0.6}
MS |= {("dgrad", "wgrad"): 0.5, ("fprop", "dgrad", "wgrad"): 0.4}

BF16 = {"precision": "bf16"}


@pytest.fixture
def timed(monkeypatch):
    """Every layer saves the same; those of a small model would save nothing."""

    def fake(switch, calls):
        return {name: {choice: MS[choice] for choice in switch.offered[name]} for name in calls}

    monkeypatch.setattr(times, "predicted", fake)


def found(case, **given):
    model, batches, loss = case
    return octavo.localize(model, batches, "tensorwise", loss=loss, autocast=None, few=4, **given)


def test_without_a_budget_nothing_that_costs_and_with_one_all(case, timed):
    assert all(layer.chosen == () for layer in found(case, budget=0).layers)
    everything = found(case, budget="100%")
    assert all(layer.chosen == ("fprop", "dgrad", "wgrad") for layer in everything.layers)
    assert everything.saved == everything.offered == pytest.approx(1.8)
    assert everything.budget == everything.loss and everything.timing == "predicted"


def test_what_costs_little_comes_first_and_the_budget_is_kept(case, timed):
    everything = found(case, budget="100%")
    costs = {layer.name: layer.costs for layer in everything.layers}
    assert all(costs[name][gemm] > 0 for name in costs for gemm in costs[name])
    cheapest = min((cost, name, gemm) for name, of in costs.items() for gemm, cost in of.items() if gemm != "fprop")
    one = found(case, budget=cheapest[0] * 1.01)
    assert [(layer.name, layer.chosen) for layer in one.layers if layer.chosen] == [(cheapest[1], (cheapest[2],))]
    some = found(case, budget=everything.cost / 3)
    assert 0 < some.cost <= some.budget < everything.cost and 0 < some.saved < everything.saved
    assert some.loss_change <= some.cost


def test_a_fall_of_the_loss_pays_for_nothing(case, timed):
    """A batch that FP8 happens to be good for: its cost is what is of second order."""
    layers = found(case, progress=0.0).layers
    assert all(
        layer.costs["fprop"] == pytest.approx(max(layer.change.mean, layer.change.second_order)) for layer in layers
    )
    assert any(layer.change.mean < layer.change.second_order for layer in layers)
    assert all(layer.costs["dgrad"] == layer.costs["wgrad"] == 0 for layer in layers)


def test_turning_the_gradient_costs_by_the_progress_that_is_made(case, timed):
    for name, costs in {layer.name: layer.costs for layer in found(case, progress=2.0).layers}.items():
        turned = {layer.name: layer.cosines for layer in found(case).layers}[name]
        assert costs["wgrad"] == pytest.approx(2 * (1 - turned["wgrad"]))


def test_the_same_each_time_and_nothing_of_the_model_changes(case, timed):
    model, _, _ = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert found(case, budget=1e-4).to_json() == found(case, budget=1e-4).to_json()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.first) is nn.Linear and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_convert_takes_the_map_and_its_plan_says_why(case, timed, tmp_path):
    localised = found(case, budget=found(case, budget="100%").cost / 3)
    path = localised.save(tmp_path / "map.toml")
    model, _, _ = case
    plan = octavo.convert(model, path)
    for layer, row in zip(localised.layers, plan.layers, strict=True):
        chosen = tuple(
            g for g, p in zip(("fprop", "dgrad", "wgrad"), row.precision.split(" / "), strict=True) if p == "fp8"
        )
        assert row.name == layer.name and chosen == layer.chosen
        assert row.reason == layer.reason and row.evidence == layer.evidence
    shown = json.loads(plan.to_json())["layers"][0]["evidence"]
    assert shown["ms_saved"] == pytest.approx(localised.layers[0].saved(localised.layers[0].chosen))


@pytest.mark.parametrize("recipe", ["tensorwise", "folded", "delayed"])
def test_the_work_that_is_reported_grows_evenly_to_all_of_it(case, timed, recipe):
    model, batches, loss = case
    told, passes = [], []
    model.register_forward_pre_hook(lambda *_: passes.append(1 + 2 * torch.is_grad_enabled()))

    def report(doing, done):
        told.append((done, sum(passes)))

    octavo.localize(model, batches, recipe, loss=loss, autocast=None, few=2, report=report)
    shares = [done for done, _ in told]
    assert shares == sorted(shares) and shares[0] == 0 and 0.85 < shares[-1] < 1
    assert all(done == pytest.approx(made / sum(passes), abs=0.12) for done, made in told)


def test_reasons(case, timed):
    assert {layer.reason for layer in found(case, budget=0).layers} == {"FP8 is over the loss budget"}
    assert {layer.reason for layer in found(case, budget="100%").layers} == {"within the loss budget"}


def test_where_fp8_saves_no_time_there_is_none(case):
    """As it is for layers as small as these."""
    localised = found(case, budget="100%")
    assert {(layer.chosen, layer.reason) for layer in localised.layers} == {((), "FP8 saves no time")}
    assert str(localised).splitlines()[-1].startswith("saves no time: no GEMM of this model is faster in FP8")


def test_the_table(case, timed):
    lines = str(found(case, budget="100%")).splitlines()
    assert lines[0].split()[:3] == ["layer", "N", "x"] and lines[1].startswith("first")
    assert "9 of 9 GEMMs in FP8 by recipe tensorwise" in lines and "predicted for an H200, not measured" in lines[-1]


def test_scales_that_are_kept_see_data_first(case, timed):
    model, batches, loss = case
    assert octavo.localize(model, batches, "delayed", loss=loss, autocast=None).layers[0].change.second_order > 0
    with pytest.raises(ConfigError, match="static"):
        octavo.localize(model, batches, "static", loss=loss)
    assert type(model.first) is nn.Linear


def test_convolutions_too():
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.Flatten())
    batches = [(torch.randn(2, 32, 6, 6),)]
    loss = lambda model, batch: model(*batch).square().mean(1)  # noqa: E731
    layers = octavo.localize(model, batches, "tensorwise", loss=loss, autocast=None).layers
    assert [(layer.name, layer.shape) for layer in layers] == [("0", (32, 288)), ("2", (32, 32))]
    assert all(0 < 1 - layer.cosines[gemm] < 0.1 for layer in layers for gemm in ("fprop", "wgrad"))


def test_attention_of_pytorch_is_not_measured_and_stays_in_bf16_in_the_map(tmp_path):
    model = nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    batches = [(torch.randn(2, 6, 32),)]
    loss = lambda model, batch: model(*batch, *batch).square().mean((1, 2))  # noqa: E731
    localised = octavo.localize(model, batches, "tensorwise", loss=loss, autocast=None, budget="100%")
    assert [layer.name for layer in localised.layers] == ["linear1", "linear2"]
    plan = octavo.plan(model, localised.save(tmp_path / "map.toml"))
    assert not any(row.is_fp8 for row in plan.layers if "attn" in row.name)


@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
def test_experts_are_in_the_table_and_the_map_and_within_the_budget(mixture, timed, recipe):
    model, batches, loss = mixture
    names = ["first", "experts.gate_up_gemm", "experts.down_gemm", "last"]
    none = octavo.localize(model, batches, recipe, loss=loss, autocast=None, budget=0)
    assert [layer.name for layer in none.layers] == names == [*none.map.modules]
    all_ = octavo.localize(model, batches, recipe, loss=loss, autocast=None, budget="100%")
    assert all(layer.chosen == ("fprop", "dgrad", "wgrad") and layer.cost(layer.all) > 0 for layer in all_.layers)
    assert all(0 < 1 - layer.cosines[gemm] < 0.1 for layer in all_.layers[1:] for gemm in layer.cosines)
    in_fp8 = [row.name for row in octavo.plan(model, none.map).layers if row.is_fp8]
    assert in_fp8 == (["first"] if recipe == "rowwise" else [])  # its dgrad, which nothing reads
    with torch.no_grad():
        before = [model(*batch) for batch in batches]
        octavo.convert(model, none.map)
        assert [model(*batch) for batch in batches] == before
        octavo.convert(model, all_.map)
        assert [model(*batch) for batch in batches] != before


def test_a_layer_that_is_not_called_where_it_is_measured_stays_in_high_precision(case, timed):
    model, batches, loss = case

    def skipping(model, batch):
        short = (model.last(model.first(batch[0])) - batch[1]).square().mean((1, 2))
        return loss(model, batch) if batch is batches[3] else short

    localised = octavo.localize(model, batches, "tensorwise", loss=skipping, autocast=None, few=3, budget="100%")
    assert [layer.name for layer in localised.layers] == ["first", "second", "last"] == [*localised.map.modules]
    second = localised.layers[1]
    assert second.chosen == () and "not called in the batches" in second.reason and "second" in str(localised)
    assert localised.layers[0].chosen and second.saved(second.all) == 0
    assert [row.is_fp8 for row in octavo.plan(model, localised.map).layers] == [True, False, True]


@pytest.mark.parametrize(("text", "nats"), [("0.1%", 0.002), ("2 %", 0.04), (0.5, 0.5), ("1e-3", 1e-3), (0, 0)])
def test_budgets(text, nats):
    assert parse_budget(text)(2.0) == pytest.approx(nats)


@pytest.mark.parametrize("text", ["", "-1%", "much", "1%%", float("nan")])
def test_no_budgets(text):
    with pytest.raises(ConfigError, match="share of the loss"):
        parse_budget(text)


def test_what_cannot_be_localised(case):
    model, batches, loss = case
    with pytest.raises(ConfigError, match="no batches"):
        octavo.localize(model, [])
    broken = [(x * float("nan"), y) for x, y in batches]
    with pytest.raises(NonFiniteError, match="the loss of the model is nan"):
        octavo.localize(model, broken, loss=loss)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_gradient_that_is_not_finite_is_an_error(case, timed, in_fp8):
    """Its cosine is NaN, which would cost nothing."""
    model, batches, loss = case

    def spoil(gradient):
        return gradient * float("nan") if not in_fp8 or model.second.enabled else gradient

    model.scale.register_hook(spoil)
    where = "with second fprop in FP8" if in_fp8 else "in high precision"
    with pytest.raises(NonFiniteError, match=f"gradient of 'scale' is not finite, {where}"):
        octavo.localize(model, batches, {"base": "tensorwise", "wgrad": BF16}, loss=loss, autocast=None)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_an_error_the_model_has_no_gradients(case):
    model, batches, loss = case

    def failing(model, batch):
        if batch is batches[1]:
            raise RuntimeError("stopped")
        return loss(model, batch)

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="stopped"):
        octavo.localize(model, batches[1:], "tensorwise", loss=failing, autocast=None, few=2)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.gpu
def test_times_are_measured_on_a_gpu(case):
    model, batches, loss = case
    batches = [(x.cuda(), y.cuda()) for x, y in batches]
    localised = octavo.localize(model.cuda(), batches, "tensorwise", loss=loss, tokens=8192)
    assert localised.timing == "measured"
    assert all(ms > 0 for layer in localised.layers for ms in layer.ms.values())
