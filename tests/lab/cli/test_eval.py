"""`octavo eval` as a user meets it; what it computes is tested in tests/lab/evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.lab.cli.main import main

SCORE = "computed loss loss_error perplexity bits_per_byte accuracy fp8_gemms fallbacks"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train_run: Callable[..., Path]) -> Path:
    return train_run(tmp_path_factory.mktemp("runs"), recipe="folded")


def test_as_json(octavo, run, capsys):
    assert octavo(["eval", run, "--tokens", 512, "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert set(said) == {"model", "text", "device", "scores", "differences", "notes", "verdict", "versions"}
    assert err == ""
    assert said["model"] == {"directory": str(run), "step": 2, "recipe": "folded", "weights": "fp32"}
    assert (said["text"]["tokens"], said["text"]["sequences"], said["text"]["heldout"]) == (512, 16, True)
    assert [score["computed"] for score in said["scores"]] == ["FP8", "high precision"]
    assert all(set(score) == set(SCORE.split()) for score in said["scores"])
    (difference,) = said["differences"]
    assert set(difference) == {"computed", "reference", "loss", "loss_error"}


def test_as_a_table_on_another_text(octavo, run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("any text will do, as long as it is long enough for a sequence or two.\n" * 3)
    assert octavo(["eval", run, "--data", tmp_path / "notes.txt", "--device", "cpu", "--step", 2]) == 0
    out, err = capsys.readouterr()
    assert "high precision  " in out and "FP8 - high precision" in out and err == ""
    assert f"text        {tmp_path / 'notes.txt'}" in out


def test_a_loss_that_is_not_finite_fails(octavo, run, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(
        "octavo.lab.evaluation.run.heldout_scores", lambda lane, batches: torch.tensor([[torch.nan, 0]] * 4)
    )
    assert octavo(["eval", run, "--device", "cpu"]) == 1
    assert "not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "nowhere: no such directory"),
        (["RUN", "--run", "nowhere"], 2, "--run nowhere: no such directory"),
        (["RUN", "--run", "RUN"], 2, "--run: needs an exported model"),
        (["RUN", "--limit", "10"], 2, "--limit and --task-files need --tasks"),
        (["RUN", "--task-files", "tasks"], 2, "--limit and --task-files need --tasks"),
        (["RUN", "--tokens", "0"], 2, "for --tokens. Must be > 0"),
        (["RUN", "--sequence", "-4"], 2, "for --sequence. Must be > 0"),
        (["RUN", "--step", "7"], 1, "contains no checkpoint of step 7"),
        (["RUN/checkpoints"], 1, "contains no checkpoint"),
        (["RUN", "--data", "EMPTY"], 1, "the file is empty"),
        (["RUN", "--data", "SHORT"], 1, "fewer than one sequence of 32"),
    ],
)
def test_errors_are_one_line(run, tmp_path, capsys, arguments, code, says):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    places = {"RUN": run, "EMPTY": tmp_path / "empty.txt", "SHORT": tmp_path / "short.txt"}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    with pytest.raises(SystemExit) as exit:
        main(["eval", *arguments])
    error = capsys.readouterr().err
    assert exit.value.code == code and says in error and error.count("\n") == 1
