"""An exported model evaluated: transformers finds the loss that Octavo finds."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest
import torch

from octavo.errors import ConfigError, DataError, UnsupportedError
from octavo.lab.evaluation import served
from octavo.lab.evaluation.run import EvalSettings, evaluate_run
from octavo.lab.evaluation.served import evaluate_served, is_served
from octavo.lab.train.export import export_run

FEW = EvalSettings(tokens=1024, device="cpu")


@pytest.fixture(scope="session")
def exported(runs, tmp_path_factory):
    """Return a directory with the run `folded` in FP8, and as plain values in FP32."""
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    home = tmp_path_factory.mktemp("exported")
    export_run(runs / "folded", home / "fp8", dtype=torch.float32)
    export_run(runs / "folded", home / "plain", "plain", dtype=torch.float32)
    return home


def by_name(found):
    return {score.computed: score for score in found.scores}, {
        (one.computed, one.reference): one for one in found.differences
    }


def test_what_is_served_is_what_was_trained(runs, exported, capfd):
    """But for scales that are no powers of two, and FP32 in place of BF16 around the products."""
    scores, differences = by_name(evaluate_served(exported / "fp8", FEW, run=runs / "folded"))
    assert list(scores) == ["served", "FP8", "high precision", "BF16 baseline", "BF16 quantised"]
    apart = differences["served", "FP8"]
    assert 0 < abs(apart.loss) < 2e-3 and apart.loss_error < 1e-3
    assert scores["served"].accuracy == pytest.approx(scores["FP8"].accuracy, abs=0.02)
    assert "model" not in capfd.readouterr().err  # no bars of other packages


def test_rotated_inputs_are_rotated_there_too(runs, exported, tmp_path):
    export_run(runs / "rotated", tmp_path / "int8", dtype=torch.float32)
    scores, differences = by_name(evaluate_served(tmp_path / "int8", FEW, run=runs / "rotated"))
    assert list(scores) == ["served", "INT8", "FP8", "high precision"]
    assert abs(differences["served", "INT8"].loss) < 1e-3


def test_the_verdict_is_that_of_the_run_itself(runs, exported, tmp_path):
    """Also where only the run knows the noise of its gap."""
    shutil.copytree(runs / "folded", run := tmp_path / "run")
    file = run / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"gap_fluctuation_percent": 0.01}))
    verdict = evaluate_run(run, FEW).verdict
    assert verdict and verdict != evaluate_run(runs / "folded", FEW).verdict
    assert evaluate_served(exported / "fp8", FEW, run=run).verdict == verdict


def test_plain_values_are_high_precision(runs, exported):
    scores, _ = by_name(evaluate_served(exported / "plain", FEW, run=runs / "folded"))
    assert scores["served"].loss == pytest.approx(scores["high precision"].loss, abs=1e-3)  # FP32 against BF16


def test_by_its_own_tokenizer_it_is_the_same(exported, tmp_path, runs):
    (tmp_path / "notes.txt").write_text("the quick brown fox, näher besehen, jumps over the lazy dog.\n" * 20)
    settings = EvalSettings(data=str(tmp_path / "notes.txt"), device="cpu")
    alone = evaluate_served(exported / "plain", settings)
    beside = evaluate_served(exported / "plain", settings, run=runs / "folded")
    assert alone.text == beside.text and alone.text["sequence"] == 32
    assert alone.scores[0].loss == pytest.approx(beside.scores[0].loss, rel=1e-6)
    assert alone.model["run"] is None and beside.model["run"] == str(runs / "folded")


def test_the_loss_is_the_mean_of_tokens():
    class Known(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            logits = torch.nn.functional.one_hot(input_ids, 4).float() * math.log(3)
            return type("Output", (), {"logits": logits})()

    inputs = torch.tensor([[0, 1], [2, 3]])
    found = served.score(Known(), torch.device("cpu"), [(inputs, torch.tensor([[0, 0], [2, 3]]))])
    right, wrong = math.log(6) - math.log(3), math.log(6)
    torch.testing.assert_close(found, torch.tensor([[(right + wrong) / 2, 0.5], [right, 1.0]], dtype=torch.float64))


def test_which_directories_are_exported(runs, exported, tmp_path):
    assert is_served(exported / "fp8") and not is_served(tmp_path)
    assert not is_served(runs / "folded") and not is_served(runs / "folded/checkpoints/step-000030")


def test_refusals_before_anything_is_loaded(runs, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "load", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match=r"an exported model has no text of its own. Name one with --data"):
        evaluate_served(exported / "fp8", FEW)
    with pytest.raises(ConfigError, match=r"--step: selects a checkpoint of a run"):
        evaluate_served(exported / "fp8", EvalSettings(data="python", step=3))
    with pytest.raises(ConfigError, match=r"--sequence 64: the model's maximum is 32"):
        evaluate_served(exported / "fp8", EvalSettings(data="python", sequence=64))
    shutil.copytree(exported / "plain", tmp_path / "other")
    (tmp_path / "other/tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"contains no tokenizer.json"):
        evaluate_served(tmp_path / "other", EvalSettings(data=str(runs / "text")))
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    with pytest.raises(ConfigError, match=r"vocabulary of 64 tokens, but the text has the id 256"):
        evaluate_served(tmp_path / "other", FEW, run=runs / "folded")


def test_a_run_with_another_tokenizer_is_refused(runs, exported, tmp_path):
    shutil.copytree(exported / "plain", tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other/tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ab"] = 257
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*other, which was not exported from it"):
        evaluate_served(tmp_path / "other", FEW, run=runs / "folded")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(exported, runs, tmp_path, name):
    shutil.copytree(exported / "plain", tmp_path / "other")
    (tmp_path / "other" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "other" / name)
    assert is_served(tmp_path / "other")
    with pytest.raises((ConfigError, DataError), match=rf"other/{name}: cannot be read|no {name}"):
        evaluate_served(tmp_path / "other", EvalSettings(data=str(runs / "text")))


@pytest.mark.parametrize("missing", ["transformers", "accelerate", "compressed_tensors"])
def test_a_package_that_is_missing_is_named(exported, monkeypatch, missing):
    monkeypatch.setattr(served, "find_spec", lambda package: None if package == missing else object())
    with pytest.raises(UnsupportedError, match=rf'Not installed: {missing}\. pip install "octavo\[serving\]"'):
        evaluate_served(exported / "fp8", FEW)


def test_a_model_that_cannot_be_loaded_is_one_line(exported, tmp_path):
    shutil.copytree(exported / "plain", tmp_path / "broken")
    config = json.loads((tmp_path / "broken/config.json").read_text())
    (tmp_path / "broken/config.json").write_text(json.dumps(config | {"model_type": "no such model"}))
    with pytest.raises(UnsupportedError, match=r"cannot be loaded by transformers \d"):
        served.load(tmp_path / "broken", torch.device("cpu"))
