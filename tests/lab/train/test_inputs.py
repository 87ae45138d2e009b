"""The files that a run was given are kept with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reporters import Listener

import octavo
from octavo.errors import CheckpointError
from octavo.lab.evaluation.run import EvalSettings, evaluate_run
from octavo.lab.train import RunConfig, train
from octavo.lab.train.calibrate import calibrate_run
from octavo.lab.train.events import Event, Started
from octavo.lab.train.export import export_flags
from octavo.lab.train.inputs import copies
from octavo.lab.train.opening import open_run

Configure = Callable[..., RunConfig]


class Interrupting(Listener):
    """Interrupts a run before its first step."""

    def report(self, event: Event) -> None:
        if isinstance(event, Started):
            raise KeyboardInterrupt


RUN = {"steps": 2, "baseline": False}


@pytest.fixture
def by_file(configure: Configure, tmp_path: Path) -> RunConfig:
    """A run by a recipe file, trained."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "rowwise"\n[modules]\n"layers.0.*" = "bf16"\n', encoding="utf-8")
    config = configure(model={"layers": 2}, run={**RUN, "recipe": str(recipe)})
    train(config)
    return config


@pytest.mark.parametrize("then", ["", 'base = "block"\n'])
def test_a_run_is_read_by_the_recipe_file_that_it_was_trained_by(by_file: RunConfig, then: str) -> None:
    file = Path(by_file.run.recipe)
    file.write_text(then, encoding="utf-8") if then else file.unlink()
    plan = open_run(by_file.run.out, device="cpu").setup().plan
    assert plan is not None
    assert {row.recipe for row in plan.layers if row.name.startswith("layers.0.")} == {"bf16"}
    assert {row.recipe for row in plan.layers if row.name.startswith("layers.1.")} == {"mine"}
    assert export_flags(by_file.run.out) is not None
    assert evaluate_run(by_file.run.out, EvalSettings(device="cpu")).model["recipe"] == str(file)


def test_a_run_does_not_go_on_by_a_recipe_file_that_has_been_changed(by_file: RunConfig) -> None:
    file = Path(by_file.run.recipe)
    before = file.read_text(encoding="utf-8")
    file.write_text('base = "rowwise"\n', encoding="utf-8")
    longer = by_file.with_run(steps=3)
    with pytest.raises(CheckpointError, match=r"mine\.toml: has been changed since this run began by it"):
        train(longer, resume=True)
    file.write_text(f"{before}# as it was\n", encoding="utf-8")
    assert train(longer, resume=True)["steps"] == 3


def test_a_run_goes_on_by_its_copies_of_files_that_are_gone(by_file: RunConfig, tmp_path: Path) -> None:
    last = tmp_path / "last.toml"
    last.write_text('base = "rowwise"\nname = "later"\n', encoding="utf-8")
    longer = by_file.with_run(steps=4, last_share=0.3, last_recipe=str(last))
    train(longer.with_run(checkpoint_every=3), resume=True)
    for step in (4,):
        shutil.rmtree(by_file.run.out / "checkpoints" / f"step-{step:06d}")
    Path(by_file.run.recipe).unlink()
    last.unlink()
    assert train(longer, resume=True)["steps"] == 4  # from step 3, by the recipe that is not the last
    assert train(longer.with_run(steps=5), resume=True)["steps"] == 5  # from step 4, by the last


def test_a_last_recipe_whose_file_was_changed_is_refused(by_file: RunConfig, tmp_path: Path) -> None:
    last = tmp_path / "last.toml"
    last.write_text('base = "bf16"\n', encoding="utf-8")
    longer = by_file.with_run(steps=3, last_share=0.3, last_recipe=str(last))
    train(longer, resume=True)
    last.write_text('base = "rowwise"\n', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"last\.toml: has been changed since this run began by it"):
        train(longer.with_run(steps=4), resume=True)


def test_the_last_recipe_may_be_another_file_when_a_run_resumes(by_file: RunConfig, tmp_path: Path) -> None:
    last = tmp_path / "last.json"
    last.write_text('{"base": "bf16"}', encoding="utf-8")
    train(by_file.with_run(steps=3, last_share=0.3, last_recipe=str(last)), resume=True)
    last.unlink()
    subject = open_run(by_file.run.out, device="cpu")
    assert subject.trained.state["recipe"] == str(last)
    plan = subject.setup().plan
    assert plan is not None and plan.recipe.name == "mine"


def test_a_run_with_static_scales_is_read_without_its_calibration_file(configure: Configure, tmp_path: Path) -> None:
    file, run = tmp_path / "scales.json", {**RUN, "recipe": "static"}
    calibrate_run(configure(run=run), batches=1).save(file)
    config = configure(run={**run, "scales": str(file)})
    train(config)
    file.unlink()
    stored = octavo.scales(open_run(config.run.out, device="cpu").setup().states[0].model)
    assert stored is not None and stored.is_known
    assert export_flags(config.run.out) is not None


def test_a_run_that_replaces_another_has_none_of_its_files(by_file: RunConfig, tmp_path: Path) -> None:
    """Nor is a checkpoint that is a link taken for one of the new run; what it leads to stays."""
    out = by_file.run.out
    (last,) = (out / "checkpoints").iterdir()
    last.rename(tmp_path / "elsewhere")
    last.symlink_to(tmp_path / "elsewhere")
    for name in ("scales.json", "calibration.json", "pipeline.json"):
        (out / name).write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        train(by_file, overwrite=True, reporters=[Interrupting()])
    assert not [*(out / "checkpoints").iterdir()] and (tmp_path / "elsewhere" / "state.json").exists()
    left = {path.name for path in out.iterdir() if path.suffix == ".json"}
    assert left == {"config.json", "plan.json"}
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(by_file, resume=True)


def test_a_run_that_replaces_another_has_no_copies_of_that(by_file: RunConfig) -> None:
    saved = {"recipe": by_file.run.recipe}
    assert copies(saved, by_file.run.out)
    train(by_file.with_run(recipe="block"), overwrite=True)
    assert not copies(saved, by_file.run.out)
