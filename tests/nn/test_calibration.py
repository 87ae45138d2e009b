"""Calibration files are read strictly, and a static scale is never guessed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.nn import Linear, calibration
from octavo.nn.calibration import Calibrated
from octavo.recipes import load

GOOD = {"format": "e4m3", "scaling": "float32", "scale": 0.0117, "amax": 5.25}
GRADIENT = {**GOOD, "format": "e5m2"}
FILE = {"version": 1, "recipes": ["delayed"], "scales": {"0.input": GOOD, "0.grad_output": GRADIENT}}


def written(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**FILE, **changes}))
    return path


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 32))


def test_scales_are_read_back_bit_for_bit(tmp_path):
    odd = [float(np.float32(x)) for x in (1 / 3, 1e-38, 3.1e38, 2.0**-126)]
    scales = {f"{i}.input": Calibrated("e4m3", "float32", scale, scale) for i, scale in enumerate(odd)}
    calibration.write(tmp_path / "a.json", ["delayed"], scales)
    assert calibration.read(tmp_path / "a.json") == scales
    assert json.loads((tmp_path / "a.json").read_text())["version"] == 1


def test_a_file_by_hand_is_taken(tmp_path):
    converted = model()
    octavo.convert(converted, "static", scales=written(tmp_path / "a.json"))
    assert converted[0].page.cells[0].tolist() == [np.float32(0.0117), 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"a\.json: calibration version 2; this version of octavo reads version 1"),
        ({"scale": {}}, r"a\.json: unknown key 'scale'\. Did you mean 'scales'\?"),
        ({"scales": {"0.input": {**GOOD, "skale": 1.0}}}, r"unknown key 'skale'"),
        ({"scales": {"0.input": {**GOOD, "scale": "1"}}}, r"scale: expected float"),
        ({"scales": {"0.input": {**GOOD, "format": "e3m4"}}}, r"format: 'e3m4' is none of"),
        ({"scales": {"0.input": GOOD}}, r"1 of 2 static scales are missing, the first that of '0\.grad_output'"),
        ({"scales": {"0.input": GOOD, "0.grad_output": GOOD}}, r"'0\.grad_output' was made for e4m3 with"),
        ({"scales": {"0.input": {**GOOD, "scale": 0.0}, "0.grad_output": GRADIENT}}, r"'0\.input' is 0\.0: it must be"),
        ({"scales": {"0.input": {**GOOD, "scale": 1e999}, "0.grad_output": GRADIENT}}, r"'0\.input' is inf"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_files_change_nothing(tmp_path, changes, message):
    plain = model()
    with pytest.raises(ConfigError, match=message):
        octavo.convert(plain, "static", scales=written(tmp_path / "a.json", **changes))
    assert type(plain[0]) is nn.Linear


def test_power_of_two_scales_are_powers_of_two():
    with pytest.raises(ConfigError, match="a positive power of two"):
        Calibrated("e4m3", "power_of_two", 0.3, 1.0).check("a", load({"base": "static"}).fprop.input.__class__())
    octave = Calibrated("e4m3", "power_of_two", 2.0**-7, 1.0)
    octave.check("a", load("rowwise").fprop.input)


def test_without_a_file_the_message_says_how_to_make_one():
    with pytest.raises(
        ConfigError, match=r"2 of 2 static scales are missing.*no calibration file was given.*'delayed'"
    ):
        octavo.convert(model(), "static")
    with pytest.raises(ConfigError, match="static scales are missing"):
        Linear(8, 8, recipe="static")


def test_a_file_that_nobody_reads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no layer has a recipe that keeps scales"):
        octavo.convert(model(), "folded", scales=written(tmp_path / "a.json"))


def test_a_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        octavo.convert(model(), "static", scales="nowhere.json")


def test_a_scale_is_one_even_where_another_is_missing(tmp_path):
    octavo.convert(started := model(), "delayed", scales=written(tmp_path / "a.json", scales={"0.input": GOOD}))
    assert started[0].page.cells[:, 0].tolist() == [np.float32(0.0117), 0]
    assert torch.isfinite(started(torch.randn(4, 40))).all()
