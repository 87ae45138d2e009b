from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from octavo.errors import ConfigError, DataError
from octavo.lab.data import bpe
from octavo.lab.data.bpe import END_OF_DOCUMENT, BPETokenizer
from octavo.lab.data.loader import open_tokens
from octavo.lab.data.tokenizer import load_tokenizer
from octavo.lab.data.tokens import prepare

TEXTS = ["def double(value):\n    return 2 * value\n" * 20, "the cat sat on the mat, the end\n" * 20]
TOKENIZER = BPETokenizer.train(TEXTS, vocab=320)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_round_trips(text: str) -> None:
    (ids,) = TOKENIZER.encode_batch([text])
    assert TOKENIZER.decode(ids) == text
    assert not (ids >= TOKENIZER.vocab).any()


def test_a_short_text_has_fewer_merges_than_asked_for() -> None:
    assert BPETokenizer.train(["abab"], vocab=4096).vocab == 272


def test_it_is_shorter_than_bytes() -> None:
    (ids,) = TOKENIZER.encode_batch([TEXTS[0]])
    assert len(ids) < 0.5 * len(TEXTS[0])


def test_a_text_that_spells_the_end_of_document_does_not_end_it() -> None:
    text = f"before {END_OF_DOCUMENT} after"
    (ids,) = TOKENIZER.encode_batch([text])
    assert TOKENIZER.end_of_document not in ids
    assert TOKENIZER.decode(ids) == text


def test_a_long_text_is_cut_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "PIECE_CHARACTERS", 50)
    texts = [TEXTS[1], "", "no line end" * 30, TEXTS[0]]
    assert [TOKENIZER.decode(ids) for ids in TOKENIZER.encode_batch(texts)] == texts
    assert len(list(bpe._pieces(TEXTS[1]))) > 5


def test_a_file_that_cuts_or_fills_up_texts_does_neither_here() -> None:
    backend = bpe._package().Tokenizer.from_str(TOKENIZER.to_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=1000)
    found = BPETokenizer(bpe._package().Tokenizer.from_str(backend.to_str()))
    assert found.encode_batch(TEXTS)[0].tolist() == TOKENIZER.encode_batch(TEXTS)[0].tolist()
    assert found.encode_template(TEXTS[0]).tolist() == TOKENIZER.encode_template(TEXTS[0]).tolist()
    assert found.fingerprint == TOKENIZER.fingerprint


def test_training_is_deterministic() -> None:
    assert BPETokenizer.train(TEXTS, vocab=320).fingerprint == TOKENIZER.fingerprint


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "deep/bpe.json"
    TOKENIZER.save(path)
    loaded = load_tokenizer(str(path))
    assert (loaded.vocab, loaded.end_of_document) == (TOKENIZER.vocab, TOKENIZER.end_of_document)
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert loaded.encode_batch(TEXTS)[0].tolist() == TOKENIZER.encode_batch(TEXTS)[0].tolist()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("vocab", [100, 321, 70_000])
def test_sizes_that_do_not_fit_are_refused(vocab: int) -> None:
    with pytest.raises(ConfigError, match=str(vocab)):
        BPETokenizer.train(TEXTS, vocab=vocab)


def test_a_malformed_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer file"):
        BPETokenizer.load(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        TOKENIZER.save(tmp_path / "file/bpe.json")


def test_by_name_it_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for i, text in enumerate(TEXTS):
        (source / f"{i}.txt").write_text(text)
    first = load_tokenizer("bpe-288", source=source, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(BPETokenizer, "train", None)
    again = load_tokenizer("bpe-288", source=source, cache_dir=tmp_path / "cache")
    assert first.fingerprint == again.fingerprint and first.vocab == 288


def test_a_large_corpus_is_sampled_evenly() -> None:
    documents = [type("Document", (), {"text": str(i)}) for i in range(12)]
    assert list(bpe._sample(documents, 4 * bpe.SAMPLE_BYTES)) == ["0", "4", "8"]
    assert len(list(bpe._sample(documents, 10))) == 12


@pytest.mark.parametrize(("before", "begin"), [("$A", None), ("<s> $A", 0), ("<s> $A </s>", 0), ("<s> <s> $A", None)])
def test_the_begin_is_what_a_post_processor_puts_before_a_text(before: str, begin: int | None) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_special_tokens(["<s>", "</s>"])
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=before, special_tokens=ids)
    assert BPETokenizer(backend).begin_of_document == (None if begin is None else backend.token_to_id("<s>"))


@pytest.mark.parametrize("adds", [True, False])
def test_the_begin_of_a_tokenizers_settings(tmp_path: Path, adds: bool) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": adds, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = backend.token_to_id("<s>") if adds else None
    assert BPETokenizer.load(tmp_path / "tokenizer.json").begin_of_document == expected


def test_documents_begin_with_it_where_they_are_separate(tmp_path: Path) -> None:
    for i, text in enumerate([*TEXTS, "and on", "and off"]):
        (tmp_path / f"{i}.txt").write_text(text)
    plain, begun = (prepare(tmp_path, TOKENIZER, tmp_path / ".cache", 0.3, begin=begin) for begin in (None, 5))
    end, documents = TOKENIZER.end_of_document, []
    for files in (plain, begun):
        ids = open_tokens(files.train)
        documents.append([part.tolist() for part in np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]])
    assert documents[1] == [[5, *ids] for ids in documents[0]]
    assert begun.train_tokens == plain.train_tokens + plain.documents
