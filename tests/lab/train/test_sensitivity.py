"""What FP8 costs each layer, and the layers that leave FP8 for it during a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reporters import Listener
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import ConfigError
from octavo.lab.guard import GuardEvent
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import RunConfig, train
from octavo.lab.train.config import SensitivityConfig
from octavo.lab.train.files import read_metrics
from octavo.lab.train.opening import open_run
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.parallel_checks import check_parallel
from octavo.lab.train.sensitivity import LayerCost, choose, layer_costs, times_the_mean
from octavo.lab.train.setup import set_up
from octavo.numerics import E4M3, dequantize, quantize
from octavo.recipes import load
from octavo_bench.fault_cases import Fault
from octavo_bench.faults import Struck

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize("is_fp8", [True, False])
def test_a_cost_is_that_of_its_definition_in_float64(is_fp8: bool) -> None:
    """Half the mean over tokens of (g . d)^2, with d from codes and scales, of a layer in FP8 or not."""
    torch.manual_seed(0)
    recipe = load("rowwise")
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    if is_fp8:
        octavo.convert(model, recipe)
    layers = {name: (layer, recipe) for name, layer in model.named_children() if isinstance(layer, nn.Linear)}
    x, target = torch.randn(3, 5, 32), torch.randn(3, 5, 16)
    costs = layer_costs(layers, lambda: (model(x) - target).square().sum(-1).mean().backward())
    assert costs.keys() == {"0", "2"}
    hidden = model[0](x)
    inputs = {"0": x, "2": F.gelu(hidden)}
    outputs = {"0": hidden, "2": model[2](inputs["2"])}
    of_all = torch.autograd.grad((outputs["2"] - target).square().sum(), [*outputs.values()])
    for (name, a), g in zip(inputs.items(), of_all, strict=True):
        pair = a.detach().flatten(0, 1), model.get_submodule(name).weight.detach()
        operands = zip(pair, (recipe.fprop.input, recipe.fprop.weight), strict=True)
        a8, w8 = (dequantize(quantize(each, E4M3, o.granularity, o.scaling), torch.float64) for each, o in operands)
        d = a8 @ w8.t() - pair[0].double() @ pair[1].double().t()
        expected = 0.5 * (g.double().flatten(0, 1) * d).sum(1).square().mean()
        assert costs[name].loss == pytest.approx(float(expected), rel=1e-3) and expected > 0
        assert costs[name].flops == 2 * 15 * pair[1].numel()


def test_a_layer_in_bf16_by_its_recipe_costs_nothing_and_one_that_is_not_called_is_left_out() -> None:
    layers = {name: (nn.Linear(8, 8), load("rowwise_bf16_fprop")) for name in "ab"}
    x = torch.randn(4, 8)
    costs = layer_costs(layers, lambda: layers["a"][0](input=x).square().sum().backward())
    assert costs == {"a": LayerCost(0.0, 2 * 4 * 64)}
    assert not choose(costs, ["a"], SensitivityConfig(every=1)) and times_the_mean(costs, "a") == 0


def chosen(losses: dict[str, float], in_bf16: str = "", **options: float) -> str:
    costs = {name: LayerCost(loss, 2.0 if name == "d" else 1.0) for name, loss in losses.items()}
    return "".join(choose(costs, in_bf16, SensitivityConfig(every=1, **options)))  # type: ignore[arg-type]


EVEN = dict.fromkeys("abcdefgh", 1.0) | {"d": 2.0}
"""All at the mean per FLOP: `d` has twice the FLOPs. Nine in all."""


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_is_recomputed_counts_once(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(48, 64, requires_grad=True)
    layers = {"layer": (layer, load("tensorwise"))}
    block = nn.Sequential(layer, nn.GELU())  # which saves the layer's result, so that it is computed again
    plain = layer_costs(layers, lambda: block(x).square().mean().backward())
    recomputed = partial(checkpoint, block, x, use_reentrant=use_reentrant)
    assert layer_costs(layers, lambda: recomputed().square().mean().backward()) == plain
    assert plain["layer"].loss > 0


def test_the_worst_per_flop_come_first_and_the_budget_is_kept() -> None:
    assert chosen(EVEN, share=0.9) == "", "none stands out"
    worse = {**EVEN, "b": 8.0, "d": 30.0, "g": 9.0}
    assert chosen(worse, share=0.9, above=1.0) == "dgb"
    assert chosen(worse, share=0.25, above=1.0) == "d"
    assert chosen(worse, share=0.12, above=1.0) == "g", "the first that fits"
    assert chosen(worse, share=0.0, above=1.0) == ""


def test_layers_of_about_the_same_cost_do_not_change_places() -> None:
    close = {**EVEN, "a": 10.0, "b": 11.0}
    assert chosen(close, share=0.12) == "b"
    assert chosen(close, in_bf16="a", share=0.12) == "a"
    assert chosen({**close, "b": 15.1}, in_bf16="a", share=0.12) == "b"
    falling = {**EVEN, "a": 2.0}  # 1.8 times the mean, which is 10 / 9... below the threshold, above two thirds of it
    assert chosen(falling) == "" and chosen(falling, in_bf16="a", share=0.2) == "a"
    assert chosen(EVEN, in_bf16="a", share=0.2) == "", "it comes back"


EVERY = {"every": 3, "share": 0.4, "above": 1.0}
RUN = {"steps": 8, "log_every": 1, "checkpoint_every": 4, "baseline": False}


def moves(out: Path) -> list[tuple[int, str, str]]:
    return [(e.step, e.layer, e.action) for e in RunReader(out).events() if e.rule == "sensitivity" and e.layer]


@pytest.fixture
def whole(configure: Configure, tmp_path: Path) -> tuple[RunConfig, Listener]:
    config = configure(run={**RUN, "out": str(tmp_path / "whole")}, sensitivity=EVERY)
    train(config, reporters=[keeper := Listener()])
    return config, keeper


def test_layers_move_within_the_budget_and_events_say_so(whole: tuple[RunConfig, Listener]) -> None:
    config, keeper = whole
    told = [event for event in keeper.of(GuardEvent) if event.rule == "sensitivity"]
    assert {event.step for event in told} == {3, 6}
    assert "nats per token in 7 linear layers" in told[0].text and told[0].value > 0
    moved = [event for event in told if event.layer]
    assert moved and all(event.action == f"{event.layer} computes by bf16" for event in moved if event.step == 3)
    assert all(event.value > EVERY["above"] / 1.5 for event in moved if "bf16" in event.action)
    in_bf16 = {event.layer for event in moved if event.step == 3}
    plan = RunReader(config.run.out).plan
    assert moves(config.run.out) == [(event.step, event.layer, event.action) for event in moved]
    changed = {row["name"] for row in plan["layers"] if row["recipe"] == "bf16"}
    assert in_bf16 & changed
    weights = {row["name"]: row["shape"][0] * row["shape"][1] for row in plan["layers"]}
    assert sum(weights[name] for name in in_bf16) <= EVERY["share"] * sum(weights.values())


def losses(out: Path) -> list[Any]:
    return [line.get("loss_fp8") for line in read_metrics(out / "metrics.jsonl")]


@pytest.mark.usefixtures("whole")
def test_a_resumed_run_goes_on_bit_for_bit(configure: Configure, tmp_path: Path) -> None:
    parts = configure(run={**RUN, "out": str(tmp_path / "parts")}, sensitivity=EVERY)
    train(parts)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000008")
    train(parts, resume=True)
    assert moves(tmp_path / "parts") == moves(tmp_path / "whole")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    heldout = [(tmp_path / name / "heldout.json").read_text() for name in ("whole", "parts")]
    assert heldout[0] == heldout[1]


def test_to_measure_changes_nothing_of_the_run(configure: Configure, tmp_path: Path) -> None:
    """Not its losses, nor what is drawn, nor what telemetry has of the step after it."""
    run = {**RUN, "recipe": "delayed", "steps": 4}
    for name, sensitivity in (("plain", {}), ("measured", {"every": 2, "share": 0.0})):
        train(configure(run={**run, "out": str(tmp_path / name)}, sensitivity=sensitivity))
    assert losses(tmp_path / "measured") == losses(tmp_path / "plain")
    stores = [RunReader(tmp_path / name) for name in ("plain", "measured")]
    assert [event.step for event in stores[1].events() if event.rule == "sensitivity"] == [2]
    (step, plain), (_, measured) = (store.snapshot(3) for store in stores)
    assert step == 3 and np.array_equal(plain, measured, equal_nan=True)


def test_an_opened_run_has_the_layers_in_fp8_that_were_trained(whole: tuple[RunConfig, Listener]) -> None:
    out = whole[0].run.out
    trained = {row["name"]: row["recipe"] for row in RunReader(out).plan["layers"]}
    plan = open_run(out, device="cpu").setup().plan
    assert plan is not None and {row.name: row.recipe for row in plan.layers} == trained
    assert "bf16" in {trained[layer] for _, layer, _ in moves(out)}


@pytest.mark.parametrize("recipe", ["delayed", "rotated"])
def test_a_rollback_takes_moves_back(configure: Configure, tmp_path: Path, recipe: str) -> None:
    """A fault after the measurement of step 6: the run goes back to step 4, and measures again."""
    sections: dict[str, Any] = {"sensitivity": EVERY, "guard": {"mode": "act", "snapshot_every": 2, "patience": 1000}}
    run = {**RUN, "steps": 12, "recipe": recipe}
    plain = configure(run={**run, "out": str(tmp_path / "plain")}, **sections)
    train(plain)
    with ranks_of(config := configure(run={**run, "out": str(tmp_path / "struck")}, **sections)) as ranks:
        struck = Struck(set_up(config, ranks), [keeper := Listener()])
        strike = lambda run, _: run.weight("norm").fill_(torch.nan)  # noqa: E731
        struck.prepare(Fault("", "weights", "sudden", "", strike=strike, at=(0,)), 8)
        struck.run()
    assert [event.back_to for event in keeper.of(GuardEvent) if event.back_to is not None] == [4]
    assert {event.step for event in keeper.of(GuardEvent) if event.rule == "sensitivity"} == {3, 6, 9}
    heldout = [(tmp_path / name / "heldout.json").read_text() for name in ("plain", "struck")]
    assert heldout[0] == heldout[1]


def test_where_it_is_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"sensitivity.every: with run.weights = 'fp8'"):
        configure(run={"weights": "fp8"}, sensitivity=EVERY)
    with pytest.raises(ConfigError, match=r"sensitivity.share: 0.95 is not between"):
        configure(sensitivity={"share": 0.95})
    with pytest.raises(ConfigError, match=r"sensitivity.every: weights that are sharded over ranks"):
        check_parallel(configure(sensitivity=EVERY), 2, 2)
