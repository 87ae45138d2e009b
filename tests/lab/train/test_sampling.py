"""Text that models write during a run, which stays as it is without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reporters import Listener
from safetensors.torch import load_file

from octavo.errors import ConfigError
from octavo.lab.data.tokenizer import ByteTokenizer
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import Sampled
from octavo.lab.train.files import SamplesFile, read_metrics
from octavo.lab.train.sampling import NOTHING, Sampling, chosen, encoded

Configure = Callable[..., RunConfig]
LOOP = {"steps": 4, "log_every": 1, "checkpoint_every": 2, "telemetry_every": 1, "histograms_every": 2}


def results(out: Path) -> dict[str, Any]:
    """Return what a run computed: losses, telemetry, weights, moments, scales, generators."""
    timed = ("tokens_per_second", "milliseconds_fp8", "milliseconds_bf16")
    found: dict[str, Any] = {
        f"line {i} {key}": value
        for i, line in enumerate(read_metrics(out / "metrics.jsonl"))
        for key, value in line.items()
        if key not in timed
    }
    for file in sorted((out / "checkpoints" / "step-000004").glob("*.safetensors")):
        found |= {f"{file.name} {name}": tensor.numpy().tobytes() for name, tensor in load_file(file).items()}
    with RunReader(out / "run.sqlite") as run:
        found |= {f"telemetry {step}": run.snapshot(step)[1].tobytes() for step in range(1, 5)}
        found["gemms"] = run.document("summary")["fp8_gemms"]
    return found


@pytest.mark.parametrize(
    ("recipe", "model"), [("delayed", {}), ("folded", {"architecture": "moe", "experts": 4})], ids=["delayed", "moe"]
)
def test_a_run_with_samples_is_one_without(
    configure: Configure, tmp_path: Path, recipe: str, model: dict[str, Any]
) -> None:
    runs = {}
    for name, sample in ({"plain": {}, "sampled": {"every": 1, "tokens": 3, "temperature": 1.0}}).items():
        config = configure(model=model, run={**LOOP, "recipe": recipe, "out": str(tmp_path / name)}, sample=sample)
        train(config, reporters=[listener := Listener()])
        runs[name] = results(config.run.out)
    plain, sampled = runs["plain"], runs["sampled"]
    assert len(plain) > 30 and plain.keys() == sampled.keys()
    assert [key for key in plain if plain[key] != sampled[key]] == []
    lines = SamplesFile.read(tmp_path / "sampled" / "samples.jsonl")
    assert lines == [event.record() for event in listener.of(Sampled)]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len(lines[0]["prompt"].encode()) == 32 and lines[0]["text"].keys() == {"fp8", "bf16"}
    assert not (tmp_path / "plain" / "samples.jsonl").exists()


def test_a_resumed_run_samples_as_one_that_was_not_interrupted(configure: Configure, tmp_path: Path) -> None:
    told = {}
    for name in ("straight", "broken"):
        config = configure(
            run={**LOOP, "baseline": False, "recipe": "bf16", "out": str(tmp_path / name)},
            sample={"every": 1, "prompt": "line 7", "tokens": 5, "temperature": 0.8},
        )
        if name == "broken":
            with pytest.raises(KeyboardInterrupt):
                train(config, reporters=[Listener(Sampled, step=3)])
        train(config, resume=name == "broken")
        told[name] = SamplesFile.read(config.run.out / "samples.jsonl")
    assert told["broken"] == told["straight"]
    assert [line["step"] for line in told["straight"]] == [1, 2, 3, 4] and told["straight"][0]["prompt"] == "line 7"


def test_an_id_is_the_likeliest_or_drawn_by_its_probability() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    assert chosen(logits, 0.0, torch.Generator()) == 1
    generator = torch.Generator().manual_seed(0)
    drawn = [chosen(logits, 2.0, generator) for _ in range(4000)]
    expected = (logits.double() / 2).softmax(0)
    error = 4 * (expected * (1 - expected) / 4000).sqrt()
    assert ((torch.bincount(torch.tensor(drawn)) / 4000 - expected).abs() < error).all()


def test_the_lowest_temperature_draws_the_likeliest_and_logits_that_are_not_finite_nothing() -> None:
    nan, inf = float("nan"), float("inf")
    assert chosen(torch.tensor([0.0, 2.0, -inf]), 1e-320, torch.Generator()) == 1
    for logits in ([0.0, nan], [0.0, inf], [-inf, -inf]):
        for temperature in (0.0, 1.0):
            assert chosen(torch.tensor(logits), temperature, torch.Generator()) == NOTHING


def test_a_baseline_that_is_no_longer_finite_ends_alone(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {**LOOP, "recipe": "folded", "checkpoint_every": 0}
    config = configure(run=run, sample={"every": 2, "tokens": 3})
    own = Sampling.after_step

    def poisoned(part: Sampling, step: Any) -> bool:
        if part._run.done == 2:
            for parameter in part._run.setup.states[1].model.parameters():
                parameter.detach().fill_(torch.nan)
        return own(part, step)

    monkeypatch.setattr(Sampling, "after_step", poisoned)
    train(config)
    first, last = SamplesFile.read(tmp_path / "run" / "samples.jsonl")
    assert first["text"]["bf16"] == "[its logits are not finite]" != first["text"]["fp8"]
    assert last["text"].keys() == {"fp8"}


def test_a_prompt_of_bytes_that_are_not_text_is_refused(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"sample.prompt: 'a.udcff' is not text"):
        configure(sample={"every": 1, "prompt": "a\udcff"})


def test_a_question_is_in_the_template_of_a_chat(configure: Configure) -> None:
    config = configure(data={"format": "chat"}, sample={"every": 1, "prompt": "Why?"})
    text = ByteTokenizer().decode(encoded("Why?", config, ByteTokenizer()))
    assert text == "user:\nWhy?\nassistant:\n"
    with pytest.raises(ConfigError, match=r"sample.prompt: is empty, and chat data need a question"):
        configure(data={"format": "chat"}, sample={"every": 1})


@pytest.mark.parametrize(
    "line", ['{"step": 1}', '{"step": 1, "prompt": "a", "text": {"fp8": 3}}', "[]", "{", "\0" * 9, "\xff", "[" * 9999]
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: str) -> None:
    path, whole = tmp_path / "samples.jsonl", {"step": 1, "prompt": "a", "text": {"fp8": "b"}}
    path.write_bytes(f"{line}\n{json.dumps(whole)}\n".encode("latin-1"))
    with pytest.warns(UserWarning, match=r"samples.jsonl: 1 line without a sample, left out"):
        file = SamplesFile(path, keep_until=1)
    file.close()
    assert path.read_text() == json.dumps(whole) + "\n"
