"""Checks one after another, of what a user named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.lab.doctor.accuracy import nonfinite
from octavo.lab.doctor.check import failure
from octavo.lab.doctor.examination import CHECKS, Examination, examination
from octavo.lab.monitor.store import RunWriter
from octavo.lab.train import checkpoint
from octavo.lab.train.config import assemble, load_preset
from octavo.lab.train.run import train

TEXT = "\n".join(f"{i} apples and {i * i % 89} pears" for i in range(2000))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of three steps."""
    root = tmp_path_factory.mktemp("doctor")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    data = {"source": str(root / "text.txt"), "cache": str(root / "cache")}
    run = {"out": str(root / "run"), "steps": 3, "device": "cpu", "eval_tokens": 256}
    settings = {"model": {"layers": 1}, "data": data, "run": run}
    train(assemble(load_preset("tiny", cuda=False), ("test", settings)))
    return root / "run"


def verdicts(found: Examination) -> dict[str, str]:
    return {result.check.name: str(result.finding.verdict) for _, result in found.run().results}


def test_a_run_is_looked_at_with_the_weights_it_has_reached(run: Path) -> None:
    found = examination(run, device="cpu")
    told = verdicts(found)
    assert list(told) == [check.name for kind in ("run", "model") for check in CHECKS[kind]]
    assert found.passed and "failure" not in told.values()
    assert (told["drift"], told["serving"], told["nan"], told["run"]) == ("ok",) * 4
    data = json.loads(json.dumps(found.to_dict()))
    assert data["passed"] and {check["of"] for check in data["checks"]} == {"run", "model"}
    assert data["versions"]["torch"] and data["hardware"]["processor"]


def test_weights_are_those_of_the_newest_checkpoint_also_of_a_run_that_was_moved(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run, tmp_path / "moved")
    (run / "checkpoints").rename(run / "gone")  # what is found in the other place is not found here
    try:
        there = examination(moved, device="cpu").subjects["model"]().model.state_dict()
    finally:
        (run / "gone").rename(run / "checkpoints")
    reached = examination(run, device="cpu").subjects["model"]().model.state_dict()
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    saved = {name.removeprefix("model."): x for name, x in checkpoint.load(newest).tensors["fp8"].items()}
    assert len(reached) > 10
    for name, weight in reached.items():
        assert torch.equal(saved[name], weight) and torch.equal(saved[name], there[name]), name


def test_of_a_run_that_still_trains_only_the_record_is_looked_at(run: Path, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    writer.write_step(1, {"loss_fp8": 5.0})
    assert list(examination(tmp_path, device="cpu").subjects) == ["run"]
    writer.close("finished", "")
    assert list(examination(tmp_path, device="cpu").subjects) == ["run", "model"]


def test_a_run_file_is_enough(run: Path, tmp_path: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    settings["run"]["out"] = str(tmp_path / "never")
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    told = verdicts(examination(tmp_path / "mine.json", device="cpu", only=["nan", "fallback"]))
    assert told == {"nan": "ok", "fallback": "ok"}
    assert not (tmp_path / "never").exists()


def test_steps_change_no_weight(run: Path) -> None:
    found = examination(run, device="cpu")
    trial = found.subjects["model"]()
    before = {name: p.detach().clone() for name, p in trial.model.named_parameters()}
    for _ in range(2):
        trial.step()
    assert all(torch.equal(before[name], p) for name, p in trial.model.named_parameters())


def test_a_model_that_cannot_be_set_up_is_a_failure(run: Path, tmp_path: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    settings["data"]["source"] = str(tmp_path / "gone.txt")
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    settings["run"]["out"] = str(tmp_path / "never")
    found = examination(tmp_path / "mine.json", device="cpu")
    assert verdicts(found) == {"set up": "failure"} and not found.passed
    assert "gone.txt" in found.results[0][1].finding.seen


def test_a_run_in_bf16_has_no_fp8_to_look_at(run: Path) -> None:
    found = examination(run / "config.json", device="cpu", recipe="bf16")
    assert verdicts(found) == {"set up": "failure"}


MINE = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))

def batches():
    yield (torch.randn(32, 64),)

def loss(model, batch):
    return model(*batch).square().mean()
"""
BROKEN = """
fine = build

def build():
    model = fine()
    model[2].weight.data[3, 5] = torch.nan
    return model
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a file of the user's."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_a_model_of_the_users_own(mine: Path) -> None:
    told = verdicts(examination(mine, device="cpu"))
    assert (told["nan"], told["fallback"], told["serving"]) == ("ok",) * 3 and "set up" not in told


def test_numbers_that_are_not_finite_are_null_in_json(mine: Path) -> None:
    mine.write_text(MINE.replace(".mean()", ".mean() * float('nan')"))
    found = examination(mine, device="cpu", only=["drift"]).run()
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["checks"][0]["verdict"] == "failure" and said["checks"][0]["numbers"]["loss_fp8"] is None


def test_a_nan_that_cannot_be_converted_is_named(mine: Path) -> None:
    mine.write_text(MINE + BROKEN)
    found = examination(mine, device="cpu")
    assert verdicts(found) == {"set up": "failure"}
    assert "2.weight holds 1 value(s)" in found.results[0][1].finding.seen


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": Path("gone.py")}, "no such file"),
        ({"only": ["triton"]}, "Did you mean 'triton kernels'"),
        ({"only": ["drift"]}, "'drift' is a check of a model: name a run file"),
        ({"only": ["disk"], "preset": "tiny"}, "'disk' is a check of a machine: leave out"),
        ({"only": ["nan", "disk"], "preset": "tiny"}, "'disk' is a check of a machine: leave out"),
        ({"only": ["events"], "preset": "tiny"}, "'events' is a check of a run: name the directory"),
        ({"recipe": "block"}, "need a model"),
        ({"trace": Path("traces")}, "need a model"),
        ({"device": "tpu"}, "run.device"),
        ({"preset": "tinny"}, "Did you mean 'tiny'"),
        ({"target": Path()}, "contains no run"),
    ],
)
def test_a_wrong_question_is_a_usage_error(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        examination(**{"device": "cpu", **given}).run()  # type: ignore[arg-type]


def test_a_failure_is_no_pass_and_the_rest_is_still_made(monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    broken = dataclasses.replace(nonfinite, look=lambda trial: failure("it is NaN"))
    monkeypatch.setitem(CHECKS, "model", (broken, *CHECKS["model"][1:]))
    found = examination(mine, device="cpu").run()
    assert not found.passed and len(found.results) == len(CHECKS["model"])


def test_an_error_of_the_text_is_a_finding_not_a_crash() -> None:
    def create() -> object:
        raise DataError("the text is gone")

    assert verdicts(Examination({"model": create})) == {"set up": "failure"}  # type: ignore[dict-item]
