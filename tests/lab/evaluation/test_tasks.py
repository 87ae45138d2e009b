"""Accuracy by task with lm-eval: its view of a model against the definition, and a run on task files of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.cli.eval import TaskFlags, TextFlags, eval_
from octavo.lab.data.tokenizer import ByteTokenizer
from octavo.lab.evaluation import tasks
from octavo.lab.evaluation.run import EvalSettings
from octavo.lab.evaluation.tasks import ROWS, continuation, evaluate_tasks, scores, scores_in_batches
from octavo.lab.models import ModelConfig, build
from octavo.lab.monitor.dashboard.verdict import of_tasks
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import train
from octavo.lab.train.config import assemble, load_preset
from octavo.lab.train.export import export_run


def test_scores_are_log_likelihoods_of_continuations() -> None:
    model = build(ModelConfig(vocab=48, dim=32, layers=2, heads=2, ffn=64, sequence=8), 0)
    pairs = [([1, 2, 3], [4, 5]), ([6], [7]), (list(range(9)), [3, 1, 2])]
    with torch.no_grad():
        found = scores(model, pairs, 8, torch.device("cpu"))
        for (context, continuation), (likelihood, is_greedy) in zip(pairs, found, strict=True):
            ids = torch.tensor([[*context, *continuation][-9:]])
            own = model(ids[:, :-1])[0].log_softmax(-1)[-len(continuation) :]
            expected = sum(float(row[i]) for row, i in zip(own, continuation, strict=True))
            assert likelihood == pytest.approx(expected, abs=1e-5)
            assert is_greedy == (own.argmax(-1).tolist() == continuation)
        greedy = int(model(torch.tensor([[1, 2]]))[0, -1].argmax())
        assert scores(model, [([1, 2], [greedy])], 8, torch.device("cpu"))[0][1]


def test_scores_of_batches_are_those_of_each_pair_in_its_place() -> None:
    model = build(ModelConfig(vocab=48, dim=32, layers=2, heads=2, ffn=64, sequence=8), 0)
    pairs = [(list(range(1 + i % 5)), [i]) for i in range(2 * ROWS + 1)]
    with torch.no_grad():
        found = scores_in_batches(model, pairs, 8, torch.device("cpu"))
        alone = [scores(model, [pair], 8, torch.device("cpu"))[0] for pair in pairs]
    assert [likelihood for likelihood, _ in found] == pytest.approx([likelihood for likelihood, _ in alone], abs=1e-5)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in alone]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_gen_toks": 3}, "def"),
        ({"until": ["g", "e"]}, "d"),
        ({"until": ["fg"], "max_gen_toks": 9}, "de"),
        ({"until": "fg"}, "de"),
        ({"until": "fd"}, "defgh"),  # one text, not one of its characters
        ({"until": None, "max_gen_toks": 2}, "de"),
        ({"do_sample": True, "temperature": 0, "max_gen_toks": 1}, "d"),
        ({"max_new_tokens": 3, "temperature": 0.0}, "def"),
        ({"max_tokens": 3, "do_sample": False, "temperature": 0.7, "top_p": 0.9}, "def"),
        ({"max_completion_tokens": 3, "max_tokens": 3, "num_beams": 1, "repetition_penalty": 1.0}, "def"),
        ({}, "defgh"),  # to the end of the document
    ],
)
def test_a_continuation_is_greedy_and_ends_where_the_task_says(options: dict[str, Any], expected: str) -> None:
    tokenizer, seen = ByteTokenizer(), []

    def logits(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        last = int(ids[0, -1])
        following = tokenizer.end_of_document if chr(last) == "h" else last + 1
        return torch.nn.functional.one_hot(torch.full_like(ids, following), tokenizer.vocab).float()

    ids = tokenizer.encode("abc").tolist()
    assert continuation(logits, tokenizer, ids, options, 4, torch.device("cpu")) == expected
    assert seen[:2] in ([3], [3, 4]) and max(seen) <= 4  # the context of the model


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"do_sample": True}, "asks for samples"),
        ({"temperature": 0.7}, "asks for samples"),  # as the harness takes it
        ({"num_beams": 4}, "'num_beams: 4', which is not supported"),
        ({"max_length": 9}, "'max_length: 9', which is not supported"),
        ({"max_gen_toks": 8, "max_tokens": 9}, r"several lengths, \[8, 9\], by the names max_gen_toks, max_tokens"),
    ],
)
def test_what_is_not_honoured_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        continuation(torch.Tensor, ByteTokenizer(), [1], options, 4, torch.device("cpu"))


def test_differences_are_paired_by_sample() -> None:
    def of(*hits: float) -> dict[str, Any]:
        samples = [{"acc": hit} for hit in hits]
        return {
            "results": {"t": {"alias": "t", "acc,none": sum(hits) / 4, "acc_stderr,none": 0.1}},
            "samples": {"t": samples},
        }

    found = tasks._compared({"fp8": of(1, 0, 0, 1), "bf16": of(1, 1, 0, 1)})
    assert found["t acc"] == pytest.approx(
        {"samples": 4, "fp8": 0.5, "fp8_error": (1 / 12) ** 0.5, "bf16": 0.75, "bf16_error": 0.25,
         "difference": -0.25, "difference_error": 0.25}
    )  # fmt: skip


def test_a_single_sample_has_no_standard_error() -> None:
    found = {"samples": 4, "fp8": 0.5, "fp8_error": 0.25}
    tables = [tasks.TaskEvaluation(model="run", tasks={"t acc": found | {"samples": n}}) for n in (4, 1)]
    shown = [str(of_task).splitlines()[-3] for of_task in tables]
    assert shown[0].endswith("0.5000 ± 0.2500") and shown[1].endswith("0.5000 (one sample)")


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UnsupportedError, match=r'pip install "octavo\[tasks\]"'):
        evaluate_tasks(tmp_path, ["t"], EvalSettings(device="cpu"))
    with pytest.raises(ConfigError, match="leave out --data"):
        eval_(tmp_path, text=TextFlags(data="x"), tasks=TaskFlags(tasks=("t",)))


def test_a_run_and_its_export_on_task_files(tmp_path: Path) -> None:
    """The harness's own loop, on local files: a choice and a generation, for a run with its baseline, and an export."""
    pytest.importorskip("lm_eval")
    (tmp_path / "text.txt").write_text("".join(f"{i} and then comes {i + 1}.\n" for i in range(300)))
    data = {"source": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "sequence": 64}
    run = {"out": str(tmp_path / "run"), "steps": 2, "eval_tokens": 512}
    train(assemble(load_preset("tiny", cuda=False), ("test", {"data": data, "run": run})))
    files = tmp_path / "files"
    files.mkdir()
    lines = [{"q": f"{i} and then comes", "choices": [str(i + 1), str(i)], "gold": 0} for i in range(6)]
    (files / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {files}/data.jsonl}}}}\ntest_split: test\n"
    choice = (
        "task: next\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    )
    said = "task: said\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{choices[0]}}'\n"
    said += "generation_kwargs: {until: ['.'], max_gen_toks: 3}\n"
    metric = "metric_list: [{metric: %s, aggregation: mean, higher_is_better: true}]\n"
    (files / "next.yaml").write_text(common + choice + metric % "acc")
    (files / "said.yaml").write_text(common + said + metric % "exact_match")
    found = evaluate_tasks(tmp_path / "run", ["next", "said"], EvalSettings(device="cpu"), files=files)
    assert {*found.tasks} == {"next acc", "said exact_match"}
    for row in found.tasks.values():
        assert row["samples"] == 6 and 0 <= row["fp8"] <= 1
        assert row["difference"] == pytest.approx(row["fp8"] - row["bf16"])
    reader = RunReader(tmp_path / "run")
    assert reader.summary["tasks"] == found.tasks == json.loads((tmp_path / "run/summary.json").read_text())["tasks"]
    assert [*of_tasks(reader)] == [] and "next acc" in str(found)
    with pytest.raises(ConfigError, match="no task 'other'"):
        evaluate_tasks(tmp_path / "run", ["other"], EvalSettings(device="cpu"), files=files)
    export_run(tmp_path / "run", tmp_path / "export", "plain", dtype=torch.float32)
    served = evaluate_tasks(tmp_path / "export", ["next"], EvalSettings(device="cpu"), files=files, limit=4)
    assert served.tasks["next acc"]["samples"] == 4 and "served" in served.tasks["next acc"]
