"""`octavo localize` on a run of a few steps."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from octavo._util.terminal import silent
from octavo.errors import CheckpointError, ConfigError
from octavo.lab.sensitivity.run import Settings, localize_run, progress_of

LAYERS = 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train_run: Callable[..., Path]) -> Path:
    """Return the directory of a run of a few steps, with weights in FP8."""
    return train_run(tmp_path_factory.mktemp("runs"), steps=3, weights="fp8")


def test_of_a_run(run):
    told = []
    found = localize_run(
        run, Settings(recipe="tensorwise", tokens=1024, device="cpu"), lambda doing, _: told.append(doing)
    )
    assert (len(found.layers), found.recipe.name, found.timing) == (LAYERS, "tensorwise", "predicted")
    assert found.loss == pytest.approx(math.log(272), rel=0.1) and found.budget == pytest.approx(found.loss / 1000)
    assert "loss, layers.0.attention.wq" in told and "gradient, layers.0.feed_forward.w2 dgrad" in told
    assert {layer.recipes[layer.all].name for layer in found.layers} == {"tensorwise"}


def test_the_recipe_is_that_of_the_run(run):
    found = localize_run(run / "checkpoints" / "step-000003", Settings(tokens=256, device="cpu"), silent)
    assert found.recipe.name == "folded"


def test_the_command(octavo, run, tmp_path, capsys):
    flags = ["--tokens", 512, "--device", "cpu", "--json", "-o", tmp_path / "map.toml"]
    assert octavo(["localize", run, "--budget", "0.05%", *flags]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert len(said["rows"]) == 3 * LAYERS and said["budget"] == pytest.approx(said["loss"] * 5e-4)
    written = tomllib.loads((tmp_path / "map.toml").read_text())
    assert written["base"] == "folded" and len(written["modules"]) == len(written["evidence"]) == LAYERS
    assert f"written: {tmp_path / 'map.toml'}" in err
    assert octavo(["plan", run / "config.json", "--recipe", tmp_path / "map.toml"]) == 0
    assert "FP8 saves no time" in capsys.readouterr().out


def test_the_table_of_the_command(octavo, run, capsys):
    assert octavo(["localize", run, "--tokens", 256, "--device", "cpu"]) == 0
    assert "0 of 21 GEMMs in FP8 by recipe folded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "map.json"], r"must be a \.toml file"),
        (["--budget", "some"], "share of the loss"),
        (["--recipe", "tensorwize"], "Did you mean 'tensorwise'"),
    ],
)
def test_wrong_flags(octavo, run, flags, message):
    with pytest.raises(ConfigError, match=message):
        octavo(["localize", run, *flags])


@pytest.mark.parametrize(("flag", "value"), [("--times", "guessed"), ("--tokens", "0")])
def test_values_that_the_command_line_refuses(octavo, run, flag, value):
    with pytest.raises(CycloptsError, match=f'Invalid value "{value}" for {flag}'):
        octavo(["localize", run, flag, value])


def test_what_is_not_there(octavo, run, tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        octavo(["localize", tmp_path])


def test_progress_is_the_slope_against_the_logarithm():
    lines = [{"step": step, "lr": 1.0, "loss_fp8": 5 - 0.3 * math.log(step)} for step in range(10, 210, 10)]
    assert progress_of(lines) == pytest.approx(0.3)
    assert progress_of(lines[:5]) is None and progress_of([]) is None
    assert progress_of([{**line, "loss_fp8": line["step"]} for line in lines]) == 0
