"""`run.weights`, what the weights of a run are stored in and who keeps their master; `run.compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo import optim
from octavo.errors import ConfigError
from octavo.lab.train import train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.setup import set_up
from octavo.lab.train.train_state import TrainState
from octavo.tensor import FP8Tensor

Configure = Callable[..., RunConfig]
MODEL = {"dim": 64, "ffn": 128, "layers": 1}
"""Large enough for `keep_small` to leave its matrices to the tier."""


def lanes(configure: Configure, weights: str, **sections: dict[str, Any]) -> dict[str, TrainState]:
    run = {"weights": weights, **sections.pop("run", {})}
    return {lane.name: lane for lane in set_up(configure(model=MODEL, run=run, **sections)).states}


def kinds(lane: TrainState) -> dict[str, str]:
    """Return what each parameter is: its dtype, or fp8."""
    parameters = lane.model.named_parameters()
    return {n: "fp8" if isinstance(p, FP8Tensor) else str(p.dtype).removeprefix("torch.") for n, p in parameters}


def test_by_default_they_are_fp32_and_the_optimizer_is_pytorch_s(configure: Configure) -> None:
    lane = lanes(configure, "fp32")["fp8"]
    assert set(kinds(lane).values()) == {"float32"}
    assert type(lane.optimizer) is torch.optim.AdamW
    assert lane.weight_bytes() == 4


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_the_optimizer_keeps_an_fp32_master_where_they_are_not(configure: Configure, weights: str) -> None:
    made = lanes(configure, weights)
    lane, baseline = made["fp8"], made["bf16"]
    found = kinds(lane)
    small = {name for name in found if "layers" not in name or "norm" in name}
    assert {found[name] for name in small} == {"bfloat16"}
    assert {found[name] for name in found.keys() - small} == {"bfloat16" if weights == "bf16" else "fp8"}
    assert type(lane.optimizer) is optim.AdamW
    assert {lane.optimizer.states_of(entry).name for entry in lane.optimizer.entries()} == {"fp32"}
    assert set(kinds(baseline).values()) == {"float32"} and type(baseline.optimizer) is torch.optim.AdamW
    assert lane.model.rope_cos.dtype == torch.float32


def test_each_block_is_compiled_without_guards_on_own_code(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compiled.append((type(self).__name__, given)))
    lanes(configure, "fp32", run={"compile": "on"})
    given = {"fullgraph": True, "dynamic": None, "options": {"guard_filter_fn": octavo.skip_own_guards}}
    assert compiled == [("Block", given)] * 2  # one block in FP8, one in BF16


def test_a_small_update_is_not_lost(configure: Configure) -> None:
    """Of 2^-12 of a weight: BF16 has 8 bits, so that it is in the master or nowhere."""
    lane = lanes(configure, "bf16")["fp8"]
    parameter = lane.parameters["layers.0.feed_forward.w1.weight"]
    before = parameter.detach().clone()
    for _ in range(40):
        for p in lane.parameters.values():
            p.grad = torch.ones_like(p)
        for group in lane.optimizer.param_groups:
            group["lr"] = float(before.abs().mean()) * 2**-12
        lane.optimizer.step()
    moved = (before.float() - parameter.detach().float()).mean()
    # Steps of AdamW with a constant gradient are of one learning rate each; the decay of weights adds a little.
    assert float(moved) == pytest.approx(40 * 2**-12 * float(before.abs().mean()), rel=0.1)


def test_blocks_that_stay_in_bf16(configure: Configure) -> None:
    plan = set_up(configure(model={**MODEL, "layers": 3}, run={"bf16_blocks": [1, 0]})).plan
    assert plan is not None
    assert {layer.name.split(".")[1] for layer in plan.layers if layer.is_fp8} == {"1", "2"}
    with pytest.raises(ConfigError, match=r"bf16_blocks = .* the model has 1 block"):
        set_up(configure(model=MODEL, run={"bf16_blocks": [1, 1]}))
    with pytest.raises(ConfigError, match="it is two counts"):
        set_up(configure(run={"bf16_blocks": [-1, 0]}))


def test_a_run_without_fp8_layers(configure: Configure) -> None:
    lane = lanes(configure, "bf16", run={"recipe": "bf16"})["bf16"]
    assert set(kinds(lane).values()) == {"bfloat16"} and type(lane.optimizer) is optim.AdamW
    with pytest.raises(ConfigError, match=r"run.weights: 'fp8' is for layers in FP8.*Take 'bf16'"):
        lanes(configure, "fp8", run={"recipe": "bf16"})
    with pytest.raises(ConfigError, match=r"Recipes that can: folded, folded_fast"):
        lanes(configure, "fp8", run={"recipe": "block"})


@pytest.mark.parametrize("clip", [{"clip": 1e-3}, {"clip": 0.0, "clip_per_group": {"*w1*": 1e-3}}])
def test_gradients_are_clipped(configure: Configure, clip: dict[str, Any]) -> None:
    made = lanes(configure, "fp8", optimizer=clip)["fp8"]
    ids = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    made.model(ids[:, :-1], ids[:, 1:]).backward()
    assert float(made._clip()) > 1e-2
    clipped = [
        p.grad
        for name, p in made.parameters.items()
        if p.grad is not None and ("w1" in name or "clip_per_group" not in clip)
    ]
    assert float(nn.utils.get_total_norm(clipped)) == pytest.approx(1e-3, rel=1e-2)  # BF16 gradients


STEPS = {"steps": 30, "batch": 8, "log_every": 30, "baseline": False, "telemetry_every": 0}


def test_each_level_of_fp8_lm_trains(configure: Configure, tmp_path: Path) -> None:
    found = []
    for level in (1, 2, 3):
        run = {**STEPS, "level": level, "out": str(tmp_path / str(level))}
        found.append(train(configure(model=MODEL, run=run, optimizer={"lr": 5e-3})))
    assert all(summary["heldout_loss_fp8"] < 2.0 for summary in found)
    weights, states = ([summary[f"{of}_bytes_per_parameter"] for summary in found] for of in ("weight", "optimizer"))
    assert weights[0] == weights[1] == 2 > weights[2] and states[0] > 1.5 * states[1]


def test_a_run_that_starts_as_guides_do_learns(configure: Configure) -> None:
    summary = train(configure(model=MODEL, run={**STEPS, "defaults": "guides"}, optimizer={"lr": 5e-3}))
    assert summary["heldout_loss_fp8"] < 2.0
    assert summary["recipe"] == "delayed" and summary["skipped_steps"] == {"fp8": 0}


@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.slow) for level in (1, 2)), 3])
def test_a_run_that_starts_as_guides_do_learns_at_every_level(configure: Configure, level: int) -> None:
    run = {**STEPS, "defaults": "guides", "level": level}
    assert train(configure(model=MODEL, run=run, optimizer={"lr": 5e-3}))["heldout_loss_fp8"] < 2.0


def test_a_run_in_fp8_weights_reaches_the_loss_of_bf16_weights(configure: Configure, tmp_path: Path) -> None:
    losses, summaries = {}, {}
    for weights in ("fp32", "bf16", "fp8"):
        run = {**STEPS, "weights": weights, "out": str(tmp_path / weights)}
        summaries[weights] = train(configure(model=MODEL, run=run, optimizer={"lr": 5e-3}))
        losses[weights] = summaries[weights]["heldout_loss_fp8"]
    assert losses["fp32"] < 2.0  # of 5.5 at the start: something was learnt
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)
    taken = {weights: summary["weight_bytes_per_parameter"] for weights, summary in summaries.items()}
    model = set_up(configure(model=MODEL, run={"weights": "fp8"})).states[0].model
    in_fp8 = sum(p.numel() for p in model.parameters() if isinstance(p, FP8Tensor))
    rows = sum(p.shape[0] for p in model.parameters() if isinstance(p, FP8Tensor))
    count = sum(p.numel() for p in model.parameters())
    assert taken == {"fp32": 4.0, "bf16": 2.0, "fp8": pytest.approx((in_fp8 + 4 * rows + 2 * (count - in_fp8)) / count)}
    kept = [summaries[weights]["optimizer_bytes_per_parameter"] for weights in taken]
    assert kept == [8.0, 10.0, pytest.approx((12 * in_fp8 + 10 * (count - in_fp8)) / count)]
