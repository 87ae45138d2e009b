"""A run opened again has the weights, and the layers in FP8, that it was trained with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo._util.config_reader import to_dict
from octavo.conversion import Plan
from octavo.errors import CheckpointError
from octavo.lab.doctor.subjects import trial_of_config
from octavo.lab.guard import Alarm
from octavo.lab.train import RunConfig, train
from octavo.lab.train.calibrate import calibrate_run
from octavo.lab.train.load_run import find, restore, settings_of, states_of, without_weights
from octavo.lab.train.run import Trainer
from octavo.lab.train.setup import make_states, set_up, trains_with
from octavo.nn import Linear

Configure = Callable[..., RunConfig]


def trained(configure: Configure, out: Path, **sections: dict[str, Any]) -> RunConfig:
    run = {"out": str(out), "steps": 2, "baseline": False, **sections.pop("run", {})}
    config = configure(run=run, **sections)
    train(config)
    return config


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp8"])
def test_weights_are_those_of_the_newest_checkpoint(configure: Configure, tmp_path: Path, weights: str) -> None:
    trained(configure, tmp_path / "run", run={"weights": weights})
    found = find(tmp_path / "run")
    model = states_of(found, settings_of(found, "test", {"device": "cpu"}))[0].model
    layer = model.get_submodule("layers.0.attention.wo")
    assert isinstance(layer, Linear) and found.step == 2
    saved = found.tensors["fp8"]
    name = "model.layers.0.attention.wo.weight"
    own = layer.weight.codes if weights == "fp8" else layer.weight
    there = saved[f"{name}.codes"] if weights == "fp8" else saved[name]
    assert torch.equal(own.view(torch.uint8), there.view(own.dtype).view(torch.uint8))


def test_static_scales_are_those_of_the_run(configure: Configure, tmp_path: Path) -> None:
    config = configure(run={"baseline": False})
    (lane,), _ = make_states(config.with_run(recipe="bf16"), torch.device("cpu"))
    tokens = torch.randint(256, (2, 16))
    calibration = octavo.calibrate(lane.model, [tokens], loss=lambda model, batch: model(batch, batch))
    calibration.save(tmp_path / "scales.json")
    trained(configure, tmp_path / "run", run={"recipe": "static", "scales": str(tmp_path / "scales.json")})
    found = find(tmp_path / "run")
    book = octavo.scales(restore(found, settings_of(found, "test", {"device": "cpu"})).states[0].model)
    assert book is not None and book.is_known
    saved = found.tensors["fp8"]["scales.layers.0.attention.wo.input"]
    assert torch.equal(book.state_dict()["layers.0.attention.wo.input"], saved)


@pytest.mark.parametrize("last", ["bf16", "rowwise_bf16_fprop"])
@pytest.mark.parametrize("recipe", ["folded", "delayed"])
def test_a_run_that_ended_by_another_recipe_is_opened_by_its_own(
    configure: Configure, tmp_path: Path, recipe: str, last: str
) -> None:
    run = {"recipe": recipe, "last_share": 0.5, "last_recipe": last, "steps": 4, "checkpoint_every": 3}
    config = trained(configure, tmp_path / "run", run=run)
    plan = (tmp_path / "run" / "plan.json").read_bytes()
    found = find(tmp_path / "run")
    setup = restore(found, settings_of(found, "test", {"device": "cpu"}))
    assert setup.plan is not None and setup.plan.recipe.name == recipe and setup.plan.fp8_layers
    model = setup.states[0].model
    assert torch.equal(model.get_parameter("norm.weight"), found.tensors["fp8"]["model.norm.weight"])
    if recipe == "delayed":
        book = octavo.scales(model)
        assert book is not None and book.is_known
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    train(config, resume=True)
    assert (tmp_path / "run" / "plan.json").read_bytes() == plan


def recipes_of(plan: Plan | None) -> dict[str, str]:
    assert plan is not None
    return {row.name: row.recipe for row in plan.layers}


@pytest.mark.parametrize(("recipe", "then"), [("folded", "block"), ("folded", "bf16"), ("delayed", "bf16")])
def test_a_layer_that_guardrails_have_refined_is_read_as_it_was_trained(
    configure: Configure, tmp_path: Path, recipe: str, then: str
) -> None:
    layer, run = "layers.0.feed_forward.w2", {"recipe": recipe, "steps": 2, "baseline": False}
    trainer = Trainer(set_up(configure(run={**run, "out": str(tmp_path)}, guard={"mode": "act"})), [])
    alarm = Alarm(0, "saturated", layer, "input", 1.0, 0.5)
    while recipes_of(trainer.setup.plan)[layer] != then:
        assert trainer.guard._refinement.up(layer, alarm)
    trainer.run()
    found = find(tmp_path)
    plan = restore(found, settings_of(found, "test", {"device": "cpu"})).plan
    assert recipes_of(plan) == recipes_of(trainer.setup.plan) and recipes_of(plan)[layer] == then


@pytest.mark.parametrize(("trained_by", "other"), [("folded", "delayed"), ("delayed", "block")])
def test_a_run_may_be_read_by_another_recipe_whichever_of_them_keeps_scales(
    configure: Configure, tmp_path: Path, trained_by: str, other: str
) -> None:
    trained(configure, tmp_path / "run", run={"recipe": trained_by})
    found = find(tmp_path / "run")
    setup = restore(found, settings_of(found, "test", {"device": "cpu", "recipe": other}))
    assert setup.plan is not None and setup.plan.recipe.name == other and setup.plan.fp8_layers
    weight = setup.states[0].model.get_parameter("layers.0.attention.wo.weight")
    assert torch.equal(weight, found.tensors["fp8"]["model.layers.0.attention.wo.weight"])


def test_the_text_may_be_gone(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(configure, tmp_path / "run")
    found = find(tmp_path / "run")
    monkeypatch.setattr("octavo.lab.train.setup.prepare", lambda *_: pytest.fail("the text was read"))
    states_of(found, settings_of(found, "test", {"device": "cpu"}))


def test_a_run_that_was_replayed_on_a_gpu_is_read_on_any_device(configure: Configure, tmp_path: Path) -> None:
    config = trained(configure, tmp_path / "run").with_run(graph="on")
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    found = find(tmp_path / "run")
    found.state["config"] = to_dict(config)
    assert restore(found, settings_of(found, "test", {"device": "cpu"})).states[0].replay is None
    assert isinstance(without_weights(tmp_path / "run")[0].get_submodule("layers.0.attention.wo"), Linear)
    assert trains_with(config, "block")
    make_states(config, torch.device("cpu"))  # as a forecast of memory does
    assert trial_of_config(config.with_run(device="cpu")).layers
    assert calibrate_run(config.with_run(device="cpu"), tmp_path / "run", batches=1).scales


def test_a_checkpoint_by_its_step(configure: Configure, tmp_path: Path) -> None:
    trained(configure, tmp_path / "run", run={"steps": 3, "checkpoint_every": 1})
    assert [find(tmp_path / "run", step).step for step in (None, 2, 3)] == [3, 2, 3]
    assert find(tmp_path / "run" / "checkpoints" / "step-000002", 2).step == 2
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1\. Checkpoints: step-000002, step-000003\."):
        find(tmp_path / "run", 1)


def test_the_baseline_has_its_own_weights(configure: Configure, tmp_path: Path) -> None:
    trained(configure, tmp_path / "run", run={"baseline": True})
    found = find(tmp_path / "run")
    lanes = states_of(found, settings_of(found, "test", {"device": "cpu", "baseline": True}))
    assert [lane.name for lane in lanes] == ["fp8", "bf16"]
    for lane in lanes:
        saved = found.tensors[lane.name]["model.layers.0.attention.wo.weight"]
        assert torch.equal(lane.model.get_parameter("layers.0.attention.wo.weight"), saved)
    assert not any(isinstance(module, Linear) for module in lanes[1].model.modules())
    assert len(states_of(found, settings_of(found, "test", {"device": "cpu"}))) == 1


def test_a_directory_without_checkpoints_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        find(tmp_path)
