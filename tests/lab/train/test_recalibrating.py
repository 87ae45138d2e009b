"""Recalibration of static scales during a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import RunConfig, train
from octavo.lab.train.calibrate import calibrate_run
from octavo.lab.train.files import read_metrics
from octavo.nn import calibration_file
from octavo.nn.calibration_file import Calibrated

Configure = Callable[..., RunConfig]
STATIC = {"baseline": False, "recipe": "static", "log_every": 1}


@pytest.fixture
def scales(configure: Configure, tmp_path: Path) -> str:
    """A calibration file of one batch."""
    path = tmp_path / "scales.json"
    calibrate_run(configure(run=STATIC), batches=1).save(path)
    return str(path)


def changes(entries: Mapping[str, Calibrated]) -> dict[str, list[tuple[int, float]]]:
    """Return the number and value of each change of each scale."""
    return {name: [(each.change, each.scale) for each in (entry, *entry.previous)] for name, entry in entries.items()}


def test_a_run_that_is_resumed_before_its_first_recalibration_has_no_file_of_later_ones(
    configure: Configure, scales: str, tmp_path: Path
) -> None:
    config = configure(run={**STATIC, "steps": 4, "scales": scales, "recalibrate_every": 3, "checkpoint_every": 2})
    train(config)
    shutil.rmtree(config.run.out / "checkpoints" / "step-000004")
    train(config, resume=True)
    entry = calibration_file.read(config.run.out / "calibration.json")["layers.0.attention.wo.input"]
    assert [each.change for each in (entry, *entry.previous)] == [2, 1]


def test_every_few_steps(configure: Configure, scales: str, tmp_path: Path) -> None:
    config = configure(run={**STATIC, "steps": 12, "scales": scales, "recalibrate_every": 5})
    train(config)
    entry = calibration_file.read(config.run.out / "calibration.json")["layers.0.attention.wo.input"]
    assert [each.change for each in (entry, *entry.previous)] == [3, 2, 1]
    told = [event for event in RunReader(config.run.out).events() if event.rule == "recalibration"]
    assert [event.step for event in told] == [5, 10] and "every 5 steps" in told[0].text
    changed = [event for event in RunReader(config.run.out).events() if event.rule == "scale" and event.step == 10]
    own = next(event for event in changed if (event.layer, event.role) == ("layers.0.attention.wo", "input"))
    assert own.value == pytest.approx(entry.scale) and own.limit == pytest.approx(entry.previous[0].scale)
    assert f"{entry.scale:.4g}, before {entry.previous[0].scale:.4g}" in own.text
    assert len(changed) == len(calibration_file.read(config.run.out / "calibration.json"))


def test_scales_end_with_the_recipe_that_has_them(configure: Configure, scales: str) -> None:
    config = configure(run={**STATIC, "steps": 8, "scales": scales, "recalibrate_every": 3, "last_share": 0.5})
    train(config)
    told = [event.step for event in RunReader(config.run.out).events() if event.rule == "recalibration"]
    assert told == [3]
    last, known = (calibration_file.read(path) for path in (config.run.out / "scales.json", Path(scales)))
    assert last.keys() == known.keys() and last != known


def test_where_a_tensor_saturates(configure: Configure, scales: str) -> None:
    config = configure(run={**STATIC, "steps": 20, "scales": scales, "recalibrate_above": 1e-9})
    train(config)
    found = calibration_file.read(config.run.out / "calibration.json")
    renewed = {name for name, entry in found.items() if entry.previous}
    assert renewed and renewed != set(found)


def test_a_resumed_run_goes_on_bit_for_bit(configure: Configure, scales: str, tmp_path: Path) -> None:
    settings = {**STATIC, "steps": 8, "scales": scales, "recalibrate_every": 3, "checkpoint_every": 4}
    whole, parts = (configure(run={**settings, "out": str(tmp_path / name)}) for name in ("whole", "parts"))
    train(whole)
    train(parts)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000008")
    train(parts, resume=True)
    files = [calibration_file.read(tmp_path / name / "calibration.json") for name in ("whole", "parts")]
    assert [changes(entries) for entries in files] == [changes(files[0])] * 2  # without those of the steps made again
    losses = [
        [line.get("loss_fp8") for line in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def test_what_saturates_is_seen_by_telemetry_alone(configure: Configure, scales: str) -> None:
    config = configure(run={**STATIC, "scales": scales, "recalibrate_above": 0.1, "telemetry_every": 0})
    with pytest.raises(ConfigError, match="recalibrate_above: telemetry measures saturation"):
        train(config)
