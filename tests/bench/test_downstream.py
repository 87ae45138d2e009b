"""Tasks of lm-eval as a result: what is asked is not in the text, and answers are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo_bench import downstream, results
from octavo_bench.kind import Output

VALUES = {downstream.in_words(number): number for number in range(downstream.TERMS**2)}


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "zero"), (19, "nineteen"), (40, "forty"), (71, "seventy one"), (300, "three hundred"),
     (841, "eight hundred forty one"), (9020, "nine thousand twenty")],
)  # fmt: skip
def test_numbers_in_words(number: int, expected: str) -> None:
    assert downstream.in_words(number) == expected


def test_questions_have_one_right_answer_and_are_not_in_the_text(tmp_path: Path) -> None:
    text = downstream.write_texts(tmp_path, 300, 20).read_text()
    for name, sign in {"sums": "plus", "products": "times"}.items():
        asked = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(asked) == 20
        for each in asked:
            first, second = (VALUES[term] for term in each["question"].removesuffix(" is").split(f" {sign} "))
            right = first + second if sign == "plus" else first * second
            assert [VALUES[choice] == right for choice in each["choices"]].index(True) == each["answer"]
            assert len({*each["choices"]}) == downstream.CHOICES and f"\n{each['question']} " not in f"\n{text}"
    for line in (tmp_path / "capitals.jsonl").read_text().splitlines():
        each = json.loads(line)
        assert each["answer"].lower() in each["question"] and each["question"] not in text
    assert all(f"{sign} " in text for sign in ("plus", "times", "loud:"))


def test_a_session_of_a_few_steps_is_a_result(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    output = Output(write=tmp_path)
    assert downstream.command(seeds="0", steps=2, questions=4, output=output) == 0
    (path,) = tmp_path.glob("*-downstream.json")
    rows = results.load(path).rows
    assert [row["task"] for row in rows] == ["sums acc", "products acc", "capitals exact_match"]
    assert all(row["samples"] == 4 and 0 <= row["fp8"] <= 100 for row in rows)
    assert all(row["difference"] == pytest.approx(row["fp8"] - row["bf16"]) for row in rows)
