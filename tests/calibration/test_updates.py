"""Recalibration of static scales when due, from values in training; the file keeps previous ones."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from torch import nn

import octavo
from octavo.calibration import Recalibration, ScalePolicy, Updates
from octavo.calibration import updates as module
from octavo.errors import ConfigError
from octavo.nn import calibration_file
from octavo.nn.telemetry import STATS, Row, Telemetry


@pytest.fixture
def static(tmp_path):
    return static_in(tmp_path)


def static_in(tmp_path):
    """Return a model with static scales and margin 0, its optimizer, which changes no weight, and its file."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 32))
    found = octavo.calibrate(
        model, [x_of(1.0)], loss=lambda m, x: m(x).square().mean(), scale_policy=ScalePolicy(margin=0)
    )
    found.save(tmp_path / "a.json")
    octavo.convert(model, "static", scales=tmp_path / "a.json")
    return model, torch.optim.SGD(model.parameters(), lr=0.0), tmp_path / "a.json"


def x_of(amax: float) -> torch.Tensor:
    torch.manual_seed(2)
    x = torch.rand(64, 40) * 0.9 * amax
    x[3, 5] = -amax
    return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, amax: float) -> None:
    model(x_of(amax)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_every_so_many_steps_all_scales_are_made_of_the_largest_since(static):
    model, optimizer, path = static
    recalibration, made = Recalibration(model, Updates(every=3, margin=2), path), []
    for amax in (0.5, 2.0, 1.0, 0.25, 0.125, 0.25):
        train(model, optimizer, amax)
        made.append(recalibration.step().keys())
    assert [bool(keys) for keys in made] == [False, False, True, False, False, True]
    assert made[2] == {"0.input", "0.grad_output", "2.input", "2.grad_output"}
    entry = calibration_file.read(path)["0.input"]
    sizes = [entry, *entry.previous]
    assert [c.amax for c in sizes] == [0.25, 2.0, 1.0]
    assert [c.scale for c in sizes] == [float(np.float32(a / 448)) * m for a, m in ((0.25, 4), (2.0, 4), (1.0, 1))]
    assert entry.origin.how == "step 6: every 3 steps; max, margin 2"
    assert octavo.scales(model).state_dict()["0.input"][0] == entry.scale
    calibration_file.undo(path)
    assert calibration_file.read(path)["0.input"].amax == 2.0


def test_a_scale_whose_budget_is_broken_is_made_anew_and_no_other(static):
    model, optimizer, path = static
    before = octavo.scales(model).state_dict()
    with Recalibration(model, Updates(saturated_above=1e-3, look_every=2), path) as recalibration:
        train(model, optimizer, 1.0)
        assert recalibration.step() == {}
        train(model, optimizer, 1.0)
        assert recalibration.step() == {}  # looked, and found nothing
        model[2].weight.data.mul_(1e-3)  # its input grows, and gradients shrink
        train(model, optimizer, 4.0)
        assert recalibration.step() == {}  # a step between two looks
        train(model, optimizer, 4.0)
        made = recalibration.step()
    assert "0.input" in made and "0.grad_output" not in made
    after = octavo.scales(model).state_dict()
    assert after["0.input"][0] == np.float32(4.0 / 448) * 2
    assert after["0.grad_output"][0] == before["0.grad_output"][0]
    how = calibration_file.read(path)["0.input"].origin.how
    assert how.startswith("step 4: 0.") and how.endswith("saturated, above 0.001; max, margin 1")
    assert all(layer.stats_slot is None for layer in (model[0], model[2]))  # telemetry has gone


def test_telemetry_that_is_there_already_is_used(static):
    model, optimizer, path = static
    with Telemetry(model) as telemetry:
        recalibration = Recalibration(model, Updates(saturated_above=0.0, look_every=1), path, rows=telemetry.rows)
        train(model, optimizer, 8.0)
        telemetry.wait()
        _, values = telemetry.snapshot()
        assert "0.input" in recalibration.step(values)
        with pytest.raises(ConfigError, match="the telemetry of step 2 is missing"):
            recalibration.step()


def test_weights_have_no_budget():
    rows = [Row("0", "input", "", ()), Row("0", "weight", "", (4, 4)), Row("1", "grad_output", "", ())]
    values = np.zeros((3, len(STATS)), dtype=np.float32)
    values[:, STATS.index("saturated")] = [0.25, 0.5, np.nan]
    assert Updates(saturated_above=0.1).broken(rows, values) == {"0.input": 0.25}
    assert Updates(saturated_above=0.25).broken(rows, values) == {}
    assert Updates().broken(rows, values) == {}


def test_what_was_never_met_keeps_its_scale(static):
    model, _, path = static
    before = path.read_bytes()
    assert Recalibration(model, Updates(every=1), path).step() == {}
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_begins_with_the_scales_of_the_model(static, tmp_path):
    model, optimizer, _ = static
    path = tmp_path / "new.json"
    recalibration = Recalibration(model, Updates(every=1), path)
    train(model, optimizer, 2.0)
    recalibration.step()
    entry = calibration_file.read(path)["0.input"]
    assert [c.scale for c in (entry, *entry.previous)] == [float(np.float32(a / 448)) for a in (4.0, 1.0)]


def test_a_resumed_run_counts_on(static):
    model, optimizer, path = static
    recalibration = Recalibration(model, Updates(every=5), path, done=4)
    train(model, optimizer, 2.0)
    assert recalibration.step()


def test_all_ranks_make_the_scales_that_any_has_broken(monkeypatch):
    def gather(found: list[dict[str, float]], mine: dict[str, float], *_: object) -> None:
        found[:] = [mine, {"1.input": 0.5, "0.input": 0.3}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert module._of_all_ranks({"0.input": 0.1}) == {"0.input": 0.3, "1.input": 0.5}


def recalibrates(rank, count):
    """Return what a file that cannot be written makes a rank raise, a new one and one that is there; then a success."""
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, path = static_in(Path(folder))
        said = []
        (blocked := Path(folder) / "directory.json").mkdir()
        for unwritable in (path / "new.json", blocked):
            recalibration = Recalibration(model, Updates(every=1), unwritable if rank == 0 else path)
            train(model, optimizer, 2.0)
            said.append(ranks.refusal(ConfigError, recalibration.step))
        train(model, optimizer, 4.0 + rank)
        made = Recalibration(model, Updates(every=1), path).step()
        return said, {name: [entry.amax, *(old.amax for old in entry.previous)] for name, entry in made.items()}


def test_a_file_that_the_first_rank_cannot_write_stops_all():
    (first, made), (second, same) = ranks.run(recalibrates, 2, timeout=60)
    assert first == second and all("Not a directory" in text or "Is a directory" in text for text in first)
    assert made == same and made["0.input"] == [5.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": -1}, "`every` must be 0 or more"),
        ({"look_every": 0}, "`look_every` 1 or more"),
        ({"saturated_above": 1.5}, "it must be a share"),
        ({"margin": 9}, "0 to 8"),
    ],
    ids=str,
)
def test_wrong_updates(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Updates(**wrong)


def test_a_model_without_static_scales(tmp_path):
    model = nn.Sequential(nn.Linear(40, 48))
    for recipe in ("folded", "delayed"):
        octavo.convert(model, recipe)
        with pytest.raises(ConfigError, match="has no static scales"):
            Recalibration(model, Updates(every=1), tmp_path / "a.json")
