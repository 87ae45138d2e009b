"""Fine-tuning as a result: texts, rows, and what counts as within the standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo_bench import finetune, results
from octavo_bench.kind import Output


def test_the_texts_ask_for_what_they_answer(tmp_path: Path) -> None:
    text, chat = finetune.write_texts(tmp_path, 30)
    lines = [json.loads(line) for line in chat.read_text().splitlines()]
    assert len(lines) == 30 and {line["task"] for line in lines} == {*finetune.TASKS}
    for line in lines:
        verb, word = line["messages"][0]["content"].split()
        assert verb == line["task"] and line["messages"][1]["content"] == finetune.TASKS[verb][1](word)
    assert not any(verb in text.read_text() for verb in finetune.TASKS)
    assert finetune.write_texts(tmp_path, 30) == (text, chat)


def test_a_difference_is_within_two_errors_or_one_answer() -> None:
    row = {"difference": -4.0, "difference_error": 2.1, "samples": 100}
    assert finetune.within_error(row) and not finetune.within_error({**row, "difference_error": 1.9})
    assert finetune.within_error({**row, "difference": -2.0, "difference_error": 0.0})


def test_a_session_of_a_few_steps_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "METHODS", {"LoRA": finetune.METHODS["LoRA"]})
    output = Output(write=tmp_path)
    assert finetune.command(seeds="0", pretraining=2, steps=1, count=60, output=output) == 0
    (path,) = tmp_path.glob("*-finetune.json")
    rows = results.load(path).rows
    assert {(row["method"], row["task"]) for row in rows} == {(m, t) for m in finetune.METHODS for t in finetune.TASKS}
