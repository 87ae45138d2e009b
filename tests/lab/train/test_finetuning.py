"""Runs that start from weights: fine-tuning on conversations, with all weights or LoRA, and their export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.cli.flags import configure
from octavo.lab.doctor.subjects import trial_of_config
from octavo.lab.evaluation.run import EvalSettings, evaluate_run
from octavo.lab.models.hugging_face import read_settings
from octavo.lab.train import train
from octavo.lab.train.calibrate import calibrate_run
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.evaluate import accuracy_by_task
from octavo.lab.train.export import export_flags, export_run
from octavo.lab.train.opening import open_run
from octavo.lab.train.parallel_checks import check_parallel
from octavo.lab.train.setup import set_up
from octavo.tensor import FP8Tensor

QUICK = {"eval_tokens": 512}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run of a few steps, in FP8."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(400)))
    data = {"source": str(folder / "text.txt"), "cache": str(folder / "cache"), "sequence": 96}
    run = {"steps": 3, "baseline": False, "weights": "fp8", "out": str(folder / "run"), "min_gain": 0, **QUICK}
    train(assemble(load_preset("tiny", cuda=False), ("test", {"data": data, "run": run})))
    lines = [
        {"messages": [{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": str(i + 1)}],
         "task": "add" if i % 2 else "more"}
        for i in range(60)
    ]  # fmt: skip
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    export_run(folder / "run", folder / "export")
    return folder


def config(base: Path, out: Path, **sections: dict[str, Any]) -> RunConfig:
    data: dict[str, Any] = {"source": str(base / "chat.jsonl"), "format": "chat", "heldout": 0.2}
    data |= {"cache": str(base / "cache"), "sequence": 96}
    run = {"start_from": str(base / "export"), "out": str(out), "steps": 2, "accumulate": 4, "min_gain": 0, **QUICK}
    own: dict[str, Any] = {"data": data, "run": run}
    settings = {name: own.get(name, {}) | sections.get(name, {}) for name in {**own, **sections}}
    return assemble(load_preset("tiny", cuda=False), ("test", settings))


def test_a_run_starts_from_the_codes_of_an_export(base: Path, tmp_path: Path) -> None:
    setup = set_up(config(base, tmp_path, run={"weights": "fp8", "baseline": False}))
    trained = open_run(base / "run", device="cpu").states()[0].parameters
    codes = {name: p for name, p in setup.states[0].parameters.items() if isinstance(p, FP8Tensor)}
    assert len(codes) == 14
    for name, weight in codes.items():
        # Where the largest code was rounded down to half the range, the scale is halved: the values are the same.
        assert torch.equal(weight.dequantize(torch.float32), trained[name].dequantize(torch.float32)), name
        assert (weight.scale == trained[name].scale).float().mean() > 0.9
    assert setup.config.model.documents == "separate" and setup.config.data.tokenizer.endswith("tokenizer.json")


def test_the_weights_alone_say_what_to_train(base: Path, tmp_path: Path) -> None:
    data = {"source": str(base / "text.txt"), "sequence": 64}
    flags = {"run": {"start_from": str(base / "export"), "out": str(tmp_path)}, "data": data}
    found = configure(None, None, flags)
    assert found.model.dim == 32 and found.data.tokenizer == str(base / "export" / "tokenizer.json")


def test_lora_over_one_byte_weights_is_trained_resumed_evaluated_and_merged(base: Path, tmp_path: Path) -> None:
    lora = {"lora": {"rank": 4}, "optimizer": {"lr": 0.1}}
    run = {"weights": "fp8", "checkpoint_every": 1, "keep": 2}
    summary = train(config(base, tmp_path / "a", run=run, **lora))
    assert {*summary["tasks"]} == {"add", "more"}
    for found in summary["tasks"].values():
        assert {"fp8", "fp8_error", "bf16", "bf16_error", "difference", "difference_error"} < found.keys()
    first, last = (open_run(tmp_path / "a", step=step).states()[0] for step in (1, 2))
    for name, parameter in last.parameters.items():
        if isinstance(parameter, FP8Tensor):
            assert torch.equal(parameter.codes.view(torch.uint8), first.parameters[name].codes.view(torch.uint8))
    updates = [state.parameters["layers.0.attention.wq.lora.A"] for state in (first, last)]
    assert not torch.equal(*updates)

    halved = train(config(base, tmp_path / "b", run={**run, "steps": 1}, **lora))
    again = train(config(base, tmp_path / "b", run=run, **lora), resume=True)
    assert halved["heldout_loss_fp8"] != again["heldout_loss_fp8"]

    evaluated = evaluate_run(tmp_path / "a", EvalSettings(device="cpu"))
    by_name = {score.computed: score for score in evaluated.scores}
    assert by_name["FP8"].loss == pytest.approx(summary["heldout_loss_fp8"]) and by_name["FP8"].bits_per_byte is None

    exported = export_run(tmp_path / "a", tmp_path / "merged", "plain", dtype=torch.float32)
    known = json.loads((Path(exported.directory) / "tokenizer_config.json").read_text())
    assert "assistant" in known["chat_template"]
    merged = set_up(config(base, tmp_path / "c", run={"start_from": str(tmp_path / "merged"), "recipe": "bf16"}))
    state = open_run(tmp_path / "a").states()[0]
    inputs = next(merged.loader)[0]
    with torch.no_grad(), octavo.disabled(state.model):
        expected, values = state.logits(inputs).float(), merged.states[0].logits(inputs).float()
    assert (expected - values).norm() < 0.04 * expected.norm()  # rounding to BF16; that to FP8 is five times as much
    codes = export_run(tmp_path / "a", tmp_path / "codes")
    assert len(codes.fp8_layers) == 14


def test_a_run_goes_on_and_is_read_without_the_weights_that_it_started_from(base: Path, tmp_path: Path) -> None:
    start = shutil.copytree(base / "export", tmp_path / "start")
    run = {"start_from": str(start), "baseline": False, "steps": 1}
    train(config(base, tmp_path / "run", run=run))
    for file in start.glob("*.safetensors"):
        file.unlink()
    shape = json.loads((start / "config.json").read_text(encoding="utf-8"))
    (start / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1}), encoding="utf-8")  # of another
    assert open_run(tmp_path / "run", device="cpu").states()
    assert export_flags(tmp_path / "run") is not None
    (start / "config.json").unlink()
    own = configure(tmp_path / "run", None, {"run": {"steps": 2}})
    assert calibrate_run(own, own.run.out, batches=1).scales
    assert trial_of_config(own).layers
    assert train(own, resume=True)["steps"] == 2
    assert own.run.start_from == json.loads((own.run.out / "config.json").read_text())["run"]["start_from"]


def masked_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return four sequences with 6, 6, 96 and no targets."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(0, 200, (4, 96), generator=generator) for _ in range(2))
    inputs[:, 0] = ~inputs[:, 0]
    targets[:2, :90] = -100
    targets[3] = -100
    return inputs, targets


def test_parts_of_a_batch_weigh_by_their_answers(base: Path, tmp_path: Path) -> None:
    """Accumulated gradients are those of the whole batch, although its parts have different numbers of targets."""
    state = set_up(config(base, tmp_path, run={"recipe": "bf16", "batch": 4})).states[0]
    state.autocast = False
    whole, parts = (state.probe(*masked_batch(), count) for count in (1, 4))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)


def test_a_calibration_weighs_parts_as_a_step_does(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.train.setup.Loader.__next__", lambda loader: masked_batch())
    whole, parts = (
        calibrate_run(config(base, tmp_path, run={"recipe": "bf16", "batch": 4, "accumulate": n}), batches=n)
        for n in (1, 4)
    )
    for name, scale in whole.scales.items():
        assert parts.scales[name].amax == pytest.approx(scale.amax, rel=0.05), name


def test_the_shape_and_tokenizer_are_those_of_the_weights(base: Path, tmp_path: Path) -> None:
    found = config(base, tmp_path, model={"dim": 999})
    known = read_settings(base / "export")
    assert {name: getattr(found.model, name) for name in known} == known
    (base / "export" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
            config(base, tmp_path)
        named = config(base, tmp_path, data={"tokenizer": str(tmp_path / "tokenizer.json")})
        assert named.model.vocab == 272
    finally:
        (tmp_path / "tokenizer.json").rename(base / "export" / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"is a run\. Export it first: octavo export"):
        config(base, tmp_path, run={"start_from": str(base / "run")})
    gone = found.run.start_from + "-gone"
    complete = {"model": {name: getattr(found.model, name) for name in ("vocab", "dim", "layers", "heads")}}
    assert config(base, tmp_path, run={"start_from": gone}, **complete).run.start_from == gone


@pytest.mark.parametrize(
    ("section", "said"), [({"lora": {"rank": 4}}, "lora.rank"), ({}, "data.format")], ids=["lora", "chat"]
)
def test_layers_that_are_split_are_refused(section: dict[str, Any], said: str, base: Path, tmp_path: Path) -> None:
    for split in ({"tensor": 2}, {"pipeline": 2}):
        wanted = config(base, tmp_path, parallel=split, **section)
        with pytest.raises(ConfigError, match=f"{said}: .* does not go with parallel"):
            check_parallel(wanted, 2, 2)


def test_conversations_of_a_run_are_no_text_of_its_export(base: Path, tmp_path: Path) -> None:
    from octavo.lab.evaluation.served import evaluate_served

    train(config(base, tmp_path / "run", run={"baseline": False, "steps": 1}))
    export_run(tmp_path / "run", tmp_path / "export", "plain")
    with pytest.raises(UnsupportedError, match="--tasks"):
        evaluate_served(tmp_path / "export", EvalSettings(device="cpu"), run=tmp_path / "run")


def test_accuracies_have_paired_errors() -> None:
    right = {"fp8": torch.tensor([1, 1, 0, 0, 1]).bool(), "bf16": torch.tensor([1, 0, 0, 1, 1]).bool()}
    found = accuracy_by_task(["", "", "", "", "b"], right)
    assert found["answers"] == pytest.approx(
        {"samples": 4, "fp8": 0.5, "fp8_error": (1 / 12) ** 0.5, "bf16": 0.5, "bf16_error": (1 / 12) ** 0.5,
         "difference": 0.0, "difference_error": (2 / 12) ** 0.5}
    )  # fmt: skip
    assert found["b"]["samples"] == 1 and found["b"]["fp8_error"] is None
