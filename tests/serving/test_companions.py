"""A model of transformers is exported with how it generates, its tokenizer and its chat template."""

from __future__ import annotations

import json

import pytest

import octavo
from octavo.errors import ConfigError
from octavo.serving import export
from octavo.serving.companions import NO_TOKENIZER

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    made = transformers.LlamaForCausalLM(config)
    made.generation_config.update(temperature=0.6, do_sample=True, eos_token_id=[2, 7])
    octavo.convert(made, "folded")
    return made


@pytest.fixture
def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": 3 + i for i in range(90)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    own.chat_template = TEMPLATE
    return own


def check(directory, tokenizer):
    generation = transformers.GenerationConfig.from_pretrained(directory)
    assert (generation.temperature, generation.eos_token_id) == (0.6, [2, 7])
    again = transformers.AutoTokenizer.from_pretrained(directory)
    said = [{"role": "user", "content": "w1 w2"}]
    assert again("w3 w4")["input_ids"] == tokenizer("w3 w4")["input_ids"]
    assert again.apply_chat_template(said, tokenize=False) == tokenizer.apply_chat_template(said, tokenize=False)


@pytest.mark.parametrize("how", ["object", "directory", "origin"])
def test_what_an_engine_needs_beside_weights_is_written(model, tokenizer, tmp_path, how):
    (tmp_path / "base").mkdir()
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "notes.txt").write_text("of somebody")
    given = {"object": tokenizer, "directory": tmp_path / "base", "origin": None}[how]
    if how == "origin":
        model.config._name_or_path = str(tmp_path / "base")
    exported = export(model, tmp_path / "out", tokenizer=given)
    check(tmp_path / "out", tokenizer)
    assert NO_TOKENIZER not in exported.notes and "notes.txt" not in exported.files
    assert exported.files["generation_config.json"] > 0


def test_a_model_of_transformers_without_a_tokenizer_says_so(model, tmp_path):
    exported = export(model, tmp_path / "out")
    assert NO_TOKENIZER in exported.notes and "generation_config.json" in exported.files


def test_texts_come_before_the_tokenizers_own(model, tokenizer, tmp_path):
    export(model, tmp_path / "out", tokenizer=tokenizer, texts={"generation_config.json": {"top_k": 3}})
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"top_k": 3}


@pytest.mark.parametrize("given", [3, "nosuch", object()])
def test_what_is_no_tokenizer_is_refused_before_anything_is_written(model, tmp_path, given):
    with pytest.raises(ConfigError, match="neither a tokenizer"):
        export(model, tmp_path / "out", tokenizer=given)
    assert not (tmp_path / "out").exists()
