from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.data import ByteTokenizer, corpus_statistics, prepare
from octavo.lab.data.chat import layout
from octavo.lab.data.loader import FIRST, NO_TARGET
from octavo.lab.data.statistics import FILE, entropy, measure, text_bytes

TOKENIZER = ByteTokenizer()


def ids_of(texts: list[str]) -> np.ndarray:
    return np.concatenate([np.append(TOKENIZER.encode(text), 256) for text in texts]).astype(np.uint16)


def shannon(items: list[int]) -> float:
    return -sum(n / len(items) * math.log(n / len(items)) for n in Counter(items).values()) + 0.0


@given(st.lists(st.text(alphabet="abcé", min_size=1, max_size=6), min_size=1, max_size=30))
def test_statistics_are_those_of_the_definition(texts: list[str]) -> None:
    ids = ids_of(texts)
    text = "".join(texts).encode()
    found = measure(ids, TOKENIZER, len(text))
    lengths = sorted(len(t.encode()) + 1 for t in texts)
    assert (found.documents, found.tokens) == (len(texts), len(ids))
    assert found.document_tokens_mean == pytest.approx(sum(lengths) / len(lengths))
    assert found.document_tokens_percentiles["0"] == lengths[0]
    assert found.document_tokens_percentiles["50"] == lengths[(len(lengths) + 1) // 2 - 1]
    assert found.document_tokens_percentiles["100"] == lengths[-1]
    repeats = [t for i, t in enumerate(texts) if t in texts[:i]]
    assert found.duplicate_documents == len(repeats)
    assert found.duplicate_tokens_share == pytest.approx(sum(len(t.encode()) + 1 for t in repeats) / len(ids))
    assert found.distinct_tokens == len(set(ids.tolist()))
    assert found.token_entropy == pytest.approx(shannon(ids.tolist()))
    assert found.byte_entropy == pytest.approx(shannon(list(text)))
    assert found.bytes_per_token == pytest.approx(len(text) / len(ids))
    assert found.bytes_sampled == len(text)


def test_a_part_of_a_document_is_a_document() -> None:
    assert measure(ids_of(["abc"])[:-1], TOKENIZER, 3).documents == 1
    assert measure(ids_of(["abc", "abc"])[:-1], TOKENIZER, 6).documents == 2


def test_copies_within_the_held_out_text_are_no_leaks() -> None:
    """Equal documents are on the same side, so that a text with copies has some in each."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 122, 400))) for _ in range(6)]
    train, heldout = ids_of(texts[:4]), ids_of([texts[4], texts[4], texts[5], texts[0]])
    found = measure(train, TOKENIZER, len(train), heldout)
    assert (found.heldout_near_duplicates, found.heldout_documents) == (1, 4)


def test_conversations_may_begin_with_the_end_of_document() -> None:
    """GPT-2's `<|endoftext|>` is both. Fillings, which have no target, are no documents."""
    conversations = [np.array([256, *b"?", *answer, 256], dtype=np.uint32) for answer in (b"yes", b"no", b"yes")]
    for ids in conversations:
        ids[0] |= FIRST | NO_TARGET
    rows = layout([conversations[:2], conversations[2:]], 16, TOKENIZER)
    found = measure(rows, TOKENIZER, 11)
    assert (found.documents, found.tokens, found.duplicate_documents) == (3, 17, 1)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(["some text", "more", "some text", "x" * 100])
    whole = measure(ids, TOKENIZER, 122)
    monkeypatch.setattr("octavo.lab.data.statistics.CHUNK", 7)
    assert measure(ids, TOKENIZER, 122) == whole


def test_a_large_corpus_is_sampled_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.data.statistics.SAMPLE_TOKENS", 50)
    found = measure(ids_of([f"text {i}" for i in range(100)]), TOKENIZER, 0)
    assert 30 <= found.bytes_sampled <= 60


def test_entropy() -> None:
    assert entropy(np.array([0, 5, 5])) == pytest.approx(math.log(2))
    assert entropy(np.array([0, 7])) == 0.0 and entropy(np.array([0])) == 0.0


def test_they_are_measured_once_and_kept_beside_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i % 30}")
    files = prepare(tmp_path, TOKENIZER, tmp_path / "cache", 0.1)
    first = corpus_statistics(files, TOKENIZER)
    assert first.tokens == files.train_tokens and first.duplicate_documents > 0
    with monkeypatch.context() as patch:
        patch.setattr("octavo.lab.data.statistics.measure", lambda *_: pytest.fail("measured again"))
        assert corpus_statistics(files, TOKENIZER) == first
    (files.directory / FILE).write_text('{"documents": ')  # cut off
    assert corpus_statistics(files, TOKENIZER) == first
    assert files == prepare(tmp_path, TOKENIZER, tmp_path / "cache", 0.1)


@given(st.lists(st.text(alphabet="ab\u00e9", max_size=6), min_size=1, max_size=9))
def test_bytes_of_a_stretch_of_documents(texts: list[str]) -> None:
    assert text_bytes(ids_of(texts), TOKENIZER) == len("".join(texts).encode())
    assert text_bytes(ids_of([*texts, "\u00e9"])[:-2], TOKENIZER) == len("".join(texts).encode()) + 3  # cut: U+FFFD


def test_bytes_of_byte_pairs() -> None:
    pytest.importorskip("tokenizers")
    from octavo.lab.data import BPETokenizer

    text = "n\u00e4her besehen ist es n\u00e4her"
    tokenizer = BPETokenizer.train([text] * 9, 272)
    ids = np.append(tokenizer.encode_batch([text])[0], tokenizer.end_of_document).astype(np.uint16)
    assert len(ids) < text_bytes(ids, tokenizer) == len(text.encode())
