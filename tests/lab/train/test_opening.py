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
from octavo.lab.train.opening import open_run, open_subject
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
    found = open_run(tmp_path / "run", device="cpu")
    model = found.states()[0].model
    layer = model.get_submodule("layers.0.attention.wo")
    assert isinstance(layer, Linear) and found.trained.step == 2
    saved = found.trained.tensors["fp8"]
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
    found = open_run(tmp_path / "run", device="cpu")
    book = octavo.scales(found.setup().states[0].model)
    assert book is not None and book.is_known
    saved = found.trained.tensors["fp8"]["scales.layers.0.attention.wo.input"]
    assert torch.equal(book.state_dict()["layers.0.attention.wo.input"], saved)


@pytest.mark.parametrize("last", ["bf16", "rowwise_bf16_fprop"])
@pytest.mark.parametrize("recipe", ["folded", "delayed"])
def test_a_run_that_ended_by_another_recipe_is_opened_by_its_own(
    configure: Configure, tmp_path: Path, recipe: str, last: str
) -> None:
    run = {"recipe": recipe, "last_share": 0.5, "last_recipe": last, "steps": 4, "checkpoint_every": 3}
    config = trained(configure, tmp_path / "run", run=run)
    plan = (tmp_path / "run" / "plan.json").read_bytes()
    found = open_run(tmp_path / "run", device="cpu")
    setup = found.setup()
    assert setup.plan is not None and setup.plan.recipe.name == recipe and setup.plan.fp8_layers
    model = setup.states[0].model
    assert torch.equal(model.get_parameter("norm.weight"), found.trained.tensors["fp8"]["model.norm.weight"])
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
    found = open_run(tmp_path, device="cpu")
    plan = found.setup().plan
    assert recipes_of(plan) == recipes_of(trainer.setup.plan) and recipes_of(plan)[layer] == then


@pytest.mark.parametrize(("trained_by", "other"), [("folded", "delayed"), ("delayed", "block")])
def test_a_run_may_be_read_by_another_recipe_whichever_of_them_keeps_scales(
    configure: Configure, tmp_path: Path, trained_by: str, other: str
) -> None:
    trained(configure, tmp_path / "run", run={"recipe": trained_by})
    found = open_run(tmp_path / "run", device="cpu", recipe=other)
    setup = found.setup()
    assert setup.plan is not None and setup.plan.recipe.name == other and setup.plan.fp8_layers
    weight = setup.states[0].model.get_parameter("layers.0.attention.wo.weight")
    assert torch.equal(weight, found.trained.tensors["fp8"]["model.layers.0.attention.wo.weight"])


def test_a_run_in_bf16_may_be_read_by_a_recipe_in_fp8(configure: Configure, tmp_path: Path) -> None:
    trained(configure, tmp_path / "run", run={"recipe": "bf16"})
    found = open_run(tmp_path / "run", device="cpu", recipe="folded")
    layer = found.states()[0].model.get_submodule("layers.0.attention.wo")
    assert isinstance(layer, Linear)
    assert torch.equal(layer.weight, found.trained.tensors["bf16"]["model.layers.0.attention.wo.weight"])


@pytest.mark.parametrize("name", ["run", "run/config.json", "mine.py"])
def test_only_a_new_model_is_opened_from_a_file(configure: Configure, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    config = to_dict(configure(run={"out": str(tmp_path / "run")}))
    (tmp_path / "run" / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        open_run(tmp_path / name)
    if name != "mine.py":
        subject = open_subject(tmp_path / name)
        assert torch.isfinite(subject.loss(subject.build(), next(subject.batches())))


def test_the_text_may_be_gone(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(configure, tmp_path / "run")
    found = open_run(tmp_path / "run", device="cpu")
    monkeypatch.setattr("octavo.lab.train.setup.prepare", lambda *_: pytest.fail("the text was read"))
    found.states()


def test_a_run_that_was_replayed_on_a_gpu_is_read_on_any_device(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(configure, tmp_path / "run").with_run(graph="on")
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    saved = open_run(tmp_path / "run").trained
    saved.state["config"] = to_dict(config)
    monkeypatch.setattr("octavo.lab.train.checkpoint.load", lambda path: saved)
    assert open_run(tmp_path / "run", device="cpu").setup().states[0].replay is None
    without_weights = open_run(tmp_path / "run", new=True).without_weights()
    assert isinstance(without_weights.get_submodule("layers.0.attention.wo"), Linear)
    assert trains_with(config, "block")
    make_states(config, torch.device("cpu"))  # as a forecast of memory does
    assert trial_of_config(config.with_run(device="cpu")).layers
    assert calibrate_run(config.with_run(device="cpu"), tmp_path / "run", batches=1).scales


def test_a_checkpoint_by_its_step(configure: Configure, tmp_path: Path) -> None:
    trained(configure, tmp_path / "run", run={"steps": 3, "checkpoint_every": 1})
    assert [open_run(tmp_path / "run", step=step).trained.step for step in (None, 2, 3)] == [3, 2, 3]
    assert open_run(tmp_path / "run" / "checkpoints" / "step-000002", step=2).trained.step == 2
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1\. Checkpoints: step-000002, step-000003\."):
        open_run(tmp_path / "run", step=1)


def test_the_baseline_has_its_own_weights(configure: Configure, tmp_path: Path) -> None:
    trained(configure, tmp_path / "run", run={"baseline": True})
    found = open_run(tmp_path / "run", device="cpu", baseline=True)
    lanes = found.states()
    assert [lane.name for lane in lanes] == ["fp8", "bf16"]
    for lane in lanes:
        saved = found.trained.tensors[lane.name]["model.layers.0.attention.wo.weight"]
        assert torch.equal(lane.model.get_parameter("layers.0.attention.wo.weight"), saved)
    assert not any(isinstance(module, Linear) for module in lanes[1].model.modules())
    assert len(open_run(tmp_path / "run", device="cpu").states()) == 1


def test_a_directory_without_checkpoints_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        open_run(tmp_path)
