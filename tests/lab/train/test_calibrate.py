from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import octavo
from octavo.calibration import ScalePolicy
from octavo.errors import CheckpointError, ConfigError
from octavo.lab.train import checkpoint, train
from octavo.lab.train.calibrate import calibrate_run
from octavo.lab.train.config import RunConfig
from octavo.lab.train.setup import set_up
from octavo.nn import calibration_file

Configure = Callable[..., RunConfig]
SHORT = {"steps": 2, "baseline": False}


def test_a_run_is_calibrated_with_its_weights_and_its_text(configure: Configure) -> None:
    config = configure(run=SHORT)
    train(config)
    found = calibrate_run(config, config.run.out, batches=2, scale_policy=ScalePolicy(margin=0))
    setup = set_up(configure(run={**SHORT, "recipe": "bf16"}))
    model = setup.states[0].model
    saved = checkpoint.load(checkpoint.find(config.run.out / "checkpoints")[-1]).tensors["fp8"]
    weights = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    model.load_state_dict(weights, strict=False)

    def loss(_: object, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return setup.states[0].loss(*batch)

    expected = octavo.calibrate(
        model, [next(setup.loader) for _ in range(2)], loss=loss, scale_policy=ScalePolicy(margin=0)
    )
    assert found.scales.keys() == expected.scales.keys()
    for name, scale in expected.scales.items():
        assert (found.scales[name].scale, found.scales[name].statistics) == (scale.scale, scale.statistics)
    assert found.origin.data == expected.origin.data
    assert found.origin.source == f"{config.run.out / 'checkpoints' / 'step-000002'} on {config.data.source}"

    fresh = calibrate_run(config, batches=2, scale_policy=ScalePolicy(margin=0))
    assert fresh.origin.source.startswith("new weights")
    assert fresh.scales["layers.0.attention.wo.input"].scale != found.scales["layers.0.attention.wo.input"].scale


def test_a_static_run_begins_with_its_scales(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    found = calibrate_run(configure(run={**SHORT, "recipe": "static"}), batches=1)
    found.save(path)
    config = configure(run={**SHORT, "recipe": "static", "scales": str(path)})
    train(config)
    after = calibration_file.read(config.run.out / "scales.json")
    assert {name: scale.scale for name, scale in after.items()} == {n: s.scale for n, s in found.scales.items()}


def test_a_batch_is_what_one_forward_of_a_step_sees(configure: Configure) -> None:
    run = {**SHORT, "batch": 8}
    whole = calibrate_run(configure(run=run), batches=1)
    parts = calibrate_run(configure(run={**run, "accumulate": 2}), batches=2)
    loud = calibrate_run(configure(run=run, optimizer={"loss_scale": "constant"}), batches=1)
    head = "layers.0.feed_forward.w2"
    assert parts.scales[f"{head}.input"].amax == whole.scales[f"{head}.input"].amax
    ratio = parts.scales[f"{head}.grad_output"].amax / whole.scales[f"{head}.grad_output"].amax
    assert ratio == pytest.approx(1, rel=0.05)  # a mean over half as many tokens, and half of that
    assert loud.scales[f"{head}.grad_output"].scale == 256 * whole.scales[f"{head}.grad_output"].scale


@pytest.mark.parametrize(
    ("recipe", "named", "used"),
    [("rotated", None, "static"), ("delayed", None, "delayed"), ("delayed", "static", "static")],
)
def test_the_recipe_is_the_runs_if_it_keeps_scales(
    configure: Configure, recipe: str, named: str | None, used: str
) -> None:
    found = calibrate_run(configure(run={**SHORT, "recipe": recipe}), recipe=named, batches=1, backward=False)
    assert {scale.origin.recipe for scale in found.scales.values()} == {used}


def test_weights_in_fp8_are_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="recipes that store scales do not support weights in FP8"):
        calibrate_run(configure(run={**SHORT, "weights": "fp8"}))


def test_a_run_without_a_checkpoint(configure: Configure) -> None:
    config = configure(run=SHORT)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint\. Name the run file"):
        calibrate_run(config, config.run.out)


def test_a_run_without_a_loss_scale_is_calibrated_with_one(configure: Configure) -> None:
    config = configure(run=SHORT)
    train(config)
    scaled = configure(run=SHORT, optimizer={"loss_scale": "dynamic", "loss_scale_start": 1024.0})
    name = "layers.0.attention.wo.grad_output"
    own, large = (calibrate_run(each, config.run.out, batches=1).scales[name] for each in (config, scaled))
    assert large.amax == pytest.approx(1024 * own.amax)
