"""Subjects from files: the model, the batches and the loss that they say, the same in every training."""

from __future__ import annotations

import json
import re
import sys
from typing import NamedTuple

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.lab.train.opening import open_subject
from octavo.lab.train.subject import Shape, call_model, first_sample, first_tensor, to_device

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 64,
}  # fmt: skip
IMAGES = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "num_labels": 5,
}  # fmt: skip


def written(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_python_file(python_file):
    subject = open_subject(python_file)
    assert (subject.name, subject.tokens, subject.unit, subject.decode) == ("mine", 32, "sample", None)
    assert same(subject.build(), subject.build())
    batches = [next(subject.batches()) for _ in range(2)]
    assert torch.equal(batches[0][0], batches[1][0])
    endless = subject.batches()
    assert torch.equal([next(endless) for _ in range(4)][3][0], batches[0][0])
    assert subject.loss(subject.build(), batches[0]).shape == ()


@pytest.mark.parametrize("missing", ["build", "batches"])
def test_a_python_file_without_a_function_is_refused(python_file, missing):
    python_file.write_text(python_file.read_text().replace(f"def {missing}", "def other"))
    with pytest.raises(ConfigError, match=rf"has no function {missing}\(\)"):
        open_subject(python_file)


def test_a_python_file_whose_batches_are_none_says_so(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from torch import nn\ndef build(): return nn.Linear(4, 4)\ndef batches(): return []\n")
    with pytest.raises(DataError, match=r"mine\.py: batches\(\) yields nothing"):
        open_subject(file)


def test_a_batch_may_be_a_named_tuple_or_one_tensor():
    class Batch(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    batch = Batch(torch.ones(3, 2), torch.zeros(3))
    moved = to_device(batch, torch.device("cpu"))
    assert isinstance(moved, Batch) and torch.equal(moved.x, batch.x)
    assert first_sample(batch).x.shape == (1, 2) and first_tensor(batch) is batch.x
    assert first_tensor(batch.x) is batch.x


def test_a_python_file_may_define_dataclasses_with_postponed_annotations(python_file):
    """They look up their module by its name."""
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    python_file.write_text(f"{text}@dataclass\nclass Config:\n    dim: int = 64\n{python_file.read_text()}")
    assert open_subject(python_file).build()[0].in_features == 64
    assert "mine" not in sys.modules, "no module of that name is replaced"


def test_a_hugging_face_config(tmp_path):
    pytest.importorskip("transformers")
    subject = open_subject(written(tmp_path, SIZES), shape=Shape(2, 16))
    assert (subject.tokens, subject.unit) == (32, "token") and "Qwen3ForCausalLM" in subject.name
    model, batch = subject.build().eval(), next(subject.batches())
    assert same(model, subject.build()) and batch["input_ids"].shape == (2, 16)
    assert subject.loss(model, batch).item() == pytest.approx(5.7, abs=0.5)  # log 300
    with torch.no_grad():
        step = subject.decode(model, batch)
        for decoded, count in ((batch, 2), (first_sample(batch), 1)):
            step = subject.decode(model, decoded)
            assert [step().logits.shape[:2] for _ in range(2)] == [(count, 1)] * 2  # the cache does not grow


def test_a_model_of_images(tmp_path):
    pytest.importorskip("transformers")
    subject = open_subject(written(tmp_path, IMAGES) / "config.json", shape=Shape(3, 16))
    assert (subject.tokens, subject.unit, subject.decode) == (3, "image", None)
    assert subject.loss(subject.build(), next(subject.batches())).shape == ()


def test_text_in_place_of_random_tokens(tmp_path):
    pytest.importorskip("transformers")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 8)
    batches = open_subject(written(tmp_path, SIZES), shape=Shape(1, 24, text)).batches()
    first, second, third = (next(batches)["input_ids"][0] for _ in range(3))
    assert bytes(first.tolist()) == b"abcdefgh" * 3 and torch.equal(first, second) and torch.equal(first, third)
    with pytest.raises(DataError, match="has 64 tokens, and one batch needs 128"):
        open_subject(tmp_path, shape=Shape(4, 32, text)).batches()


def test_a_run_file_with_its_text(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"{i} apples and {i * i % 89} pears" for i in range(500)))
    data = {
        "source": str(tmp_path / "text.txt"),
        "tokenizer": "bytes",
        "sequence": 16,
        "cache": str(tmp_path / "cache"),
    }
    run = {"model": {"dim": 32, "layers": 1, "heads": 2}, "data": data, "run": {"batch": 2}}
    (tmp_path / "mine.json").write_text(json.dumps(run))
    subject = open_subject(tmp_path / "mine.json")
    model, batch = subject.build(), next(subject.batches())
    assert (subject.name, subject.tokens) == ("mine", 32) and same(model, subject.build())
    assert subject.loss(model, batch).item() == pytest.approx(5.6, abs=0.5)  # log 258
    assert subject.decode(model, batch)().shape[:2] == (2, 1)
    assert subject.decode(model, first_sample(batch))().shape[:2] == (1, 1)
    (tmp_path / "mine.json").write_text(json.dumps(run | {"run": {"batch": 5000}}))
    with pytest.raises(DataError, match=f"^{re.escape(data['source'])}: the corpus has"):
        open_subject(tmp_path / "mine.json").batches()


def test_what_is_no_subject_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        open_subject(tmp_path / "nothing.py")
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="the model's maximum is 64 tokens"):
        open_subject(written(tmp_path, SIZES), shape=Shape(1, 65))
    with pytest.raises(ConfigError, match="returns no loss"):
        call_model(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
