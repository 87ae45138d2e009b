"""Decoding of exported models: the step is that of generation, and its weights are the file's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import octavo
from octavo.errors import RunError
from octavo.lab.train.own_model import hugging_face_config
from octavo.lab.train.subject import Shape, Subject
from octavo_bench import results
from octavo_bench.decoding import check_codes, decoding_rows, decoding_step
from octavo_bench.phases import KIND, MODEL

pytest.importorskip("transformers")


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **small, **heads}))
    return hugging_face_config(tmp_path / "config.json", Shape(2, 16))


def test_every_call_is_the_next_token_in_the_context(subject: Subject) -> None:
    model, ids = subject.build().eval(), torch.randint(96, (3, 12))
    with torch.no_grad():
        step, expected = decoding_step(model, ids), model(input_ids=ids, use_cache=False).logits[:, -1:]
        for _ in range(3):
            torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)


def test_a_row_per_batch_and_precision(subject: Subject) -> None:
    rows = [*decoding_rows("tiny", subject, ["folded", "rotated"], [1, 3], torch.device("cpu"), context=8)]
    assert [(row["implementation"], row["batch"]) for row in rows] == [
        (name, batch) for name in ("bf16", "folded", "rotated") for batch in (1, 3)
    ]
    assert [row["ratio_to_bf16"] for row in rows[:2]] == [1.0, 1.0]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"], rel=1e-2)
        if row["implementation"] == "folded":  # a rotation is a matrix, as large as these
            assert row["exported_bytes"] < 0.9 * rows[0]["exported_bytes"]
    results.Result(kind="phases", date="2026-11-29", hardware="h200", versions={}, command="x", rows=tuple(rows))
    assert "exported, 3 sequences of 8" in KIND.markdown(rows)


@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_other_codes_than_the_files_are_refused(subject: Subject, tmp_path: Path, recipe: str) -> None:
    model = subject.build().bfloat16()
    octavo.convert(model, recipe)
    octavo.export(model, tmp_path / "out")
    with octavo.nn.reuse_weight_codes(model):
        check_codes(model, tmp_path / "out")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1.0
    with octavo.nn.reuse_weight_codes(model), pytest.raises(RunError, match=r"layers.1.mlp.down_proj is exported"):
        check_codes(model, tmp_path / "out")
