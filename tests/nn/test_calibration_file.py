"""Calibration files are read strictly, and a static scale is never guessed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.nn import Linear, calibration_file
from octavo.nn.calibration_file import Calibrated, Provenance, Statistics
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
    calibration_file.write(tmp_path / "a.json", scales)
    assert calibration_file.read(tmp_path / "a.json") == scales
    assert json.loads((tmp_path / "a.json").read_text())["version"] == 2


def test_a_file_by_hand_is_taken(tmp_path):
    converted = model()
    octavo.convert(converted, "static", scales=written(tmp_path / "a.json"))
    assert converted[0].scaling_slot.scale_and_amax[0].tolist() == [np.float32(0.0117), 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, r"a\.json: calibration version 3; this version of octavo reads versions 1 and 2"),
        ({"scale": {}}, r"a\.json: unknown key 'scale'\. Did you mean 'scales'\?"),
        ({"scales": {"0.input": {**GOOD, "skale": 1.0}}}, r"unknown key 'skale'"),
        ({"scales": {"0.input": {**GOOD, "scale": "1"}}}, r"scale: expected float"),
        ({"scales": {"0.input": {**GOOD, "format": "e3m4"}}}, r"format: 'e3m4' is none of"),
        ({"scales": {"0.input": GOOD}}, r"1 of 2 static scales are missing, the first that of '0\.grad_output'"),
        ({"scales": {"0.input": GOOD, "0.grad_output": GOOD}}, r"'0\.grad_output' was made for e4m3 with"),
        ({"scales": {"0.input": {**GOOD, "scale": 0.0}, "0.grad_output": GRADIENT}}, r"'0\.input' is 0\.0: it must be"),
        ({"scales": {"0.input": {**GOOD, "scale": 1e999}, "0.grad_output": GRADIENT}}, r"0\.input: .*, got inf"),
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
    assert started[0].scaling_slot.scale_and_amax[:, 0].tolist() == [np.float32(0.0117), 0]
    assert torch.isfinite(started(torch.randn(4, 40))).all()


# --- versions, changes and undo -------------------------------------------------------------------------------------


def entry(scale: float, how: str = "by hand") -> Calibrated:
    return Calibrated(
        "e4m3", "float32", scale, 448 * scale, origin=Provenance(recipe="static", how=how, data="sha256:0")
    )


def scales_of(path: Path) -> dict[str, float]:
    return {name: calibrated.scale for name, calibrated in calibration_file.read(path).items()}


def test_a_file_of_version_1_is_read_and_continued(tmp_path):
    path = written(tmp_path / "a.json")
    assert calibration_file.read(path)["0.input"] == Calibrated("e4m3", "float32", 0.0117, 5.25)
    calibration_file.update(path, {"0.input": entry(0.5)})
    after = calibration_file.read(path)
    assert json.loads(path.read_text())["version"] == 2
    assert after["0.input"].previous == (Calibrated("e4m3", "float32", 0.0117, 5.25),)
    assert after["0.grad_output"] == Calibrated("e5m2", "float32", 0.0117, 5.25)
    calibration_file.undo(path)
    assert calibration_file.read(path)["0.input"] == Calibrated("e4m3", "float32", 0.0117, 5.25)
    with pytest.raises(ConfigError, match="nothing to undo"):
        calibration_file.undo(path)


def test_everything_of_an_entry_is_read_back(tmp_path):
    statistics = Statistics(
        elements=10, batches=2, zero=0.1, flushed=1 / 3, subnormal=0.0, saturated=0.0,
        percentiles={"50": 1e-30}, batch_amax=(1.0, 2.0), lowest=1.0, highest=None, suggested="e4m3",
    )  # fmt: skip
    full = replace(entry(0.25), statistics=statistics, previous=(entry(0.5), Calibrated("e5m2", "float32", 1.0, 2.0)))
    calibration_file.write(tmp_path / "a.json", {"0.input": full})
    assert calibration_file.read(tmp_path / "a.json") == {"0.input": full}


def test_what_is_not_known_is_not_written(tmp_path):
    calibration_file.write(tmp_path / "a.json", {"0.input": Calibrated("e4m3", "float32", 1.0, 2.0)})
    kept = json.loads((tmp_path / "a.json").read_text())["scales"]["0.input"]
    assert kept == {"format": "e4m3", "scaling": "float32", "scale": 1.0, "amax": 2.0}


def test_changes_are_numbered_and_undone_one_by_one(tmp_path):
    path = tmp_path / "a.json"
    calibration_file.update(path, {"0.input": entry(1.0), "1.input": entry(2.0)})
    calibration_file.update(path, {"0.input": entry(3.0)})
    calibration_file.update(path, {"0.input": entry(4.0), "2.input": entry(5.0)})
    assert [c.change for c in calibration_file.read(path).values()] == [3, 1, 3]
    assert scales_of(path) == {"0.input": 4.0, "1.input": 2.0, "2.input": 5.0}

    undone = calibration_file.undo(path)
    assert {n: (a.scale, b and b.scale) for n, (a, b) in undone.items()} == {"0.input": (4, 3), "2.input": (5, None)}
    assert scales_of(path) == {"0.input": 3.0, "1.input": 2.0}
    calibration_file.undo(path)
    assert scales_of(path) == {"0.input": 1.0, "1.input": 2.0}
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="nothing to undo"):
        calibration_file.undo(path)
    assert path.read_bytes() == before


def test_some_layers_are_undone_alone(tmp_path):
    path = tmp_path / "a.json"
    for factor in (1.0, 2.0, 3.0):
        calibration_file.update(path, {name: entry(factor) for name in ("0.input", "1.input", "1.grad_output")})
    calibration_file.undo(path, ["1"])
    assert scales_of(path) == {"0.input": 3.0, "1.input": 2.0, "1.grad_output": 2.0}
    calibration_file.undo(path, ["*.grad_output"])
    assert scales_of(path) == {"0.input": 3.0, "1.input": 2.0, "1.grad_output": 1.0}
    calibration_file.undo(path)  # the newest change there is: that of 0 alone
    assert scales_of(path) == {"0.input": 2.0, "1.input": 2.0, "1.grad_output": 1.0}
    with pytest.raises(ConfigError, match=r"no layer or scale matches '1\.inptu'\. Did you mean '1\.input'"):
        calibration_file.undo(path, ["1.inptu"])


def test_a_change_after_an_undo_has_a_number_of_its_own(tmp_path):
    path = tmp_path / "a.json"
    calibration_file.update(path, {"0.input": entry(1.0), "1.input": entry(1.0)})
    calibration_file.update(path, {"0.input": entry(2.0), "1.input": entry(2.0)})
    calibration_file.undo(path, ["0"])
    calibration_file.update(path, {"0.input": entry(3.0)})
    calibration_file.undo(path)
    assert scales_of(path) == {"0.input": 1.0, "1.input": 2.0}


def test_only_so_many_previous_values_are_kept(tmp_path):
    path = tmp_path / "a.json"
    for i in range(calibration_file.KEPT + 5):
        calibration_file.update(path, {"0.input": entry(1.0 + i)})
    previous = calibration_file.read(path)["0.input"].previous
    assert [c.scale for c in previous] == [calibration_file.KEPT + 4.0 - i for i in range(calibration_file.KEPT)]
    assert all(c.previous == () for c in previous)


def test_a_file_that_cannot_be_replaced_stays_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    calibration_file.update(path, {"0.input": entry(1.0)})
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        calibration_file.update(path, {"0.input": entry(2.0)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_book_says_where_its_scales_come_from(tmp_path):
    octavo.convert(started := model(), "delayed")
    started(torch.randn(4, 40)).sum().backward()
    octavo.scales(started).update_scales()
    octavo.scales(started).save(tmp_path / "a.json")
    origin = calibration_file.read(tmp_path / "a.json")["0.input"].origin
    assert (origin.recipe, origin.how, origin.change) == ("delayed", "the largest values of training", 1)
