from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.data import ByteTokenizer, encode
from octavo.lab.data.corpus import open_corpus
from octavo.lab.data.encode import (
    SPACE,
    SplitTotals,
    digest,
    encode_all,
    encode_split,
    tail,
    threshold,
    unigram_entropy,
)


def encoded(tmp_path: Path, texts: list[str], fraction: float = 0.25) -> tuple[SplitTotals, list[str], list[str]]:
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    for i, text in enumerate(texts):
        (source / f"{i:03}.txt").write_bytes(text.encode())
    written = encode_split(open_corpus(source), ByteTokenizer(), folder, fraction)
    return written, documents_of(folder / "train.bin"), documents_of(folder / "heldout.bin")


def documents_of(path: Path) -> list[str]:
    ids = np.fromfile(path, dtype="<u2")
    ends = np.flatnonzero(ids == 256) + 1
    parts = np.split(ids, ends)
    return [ByteTokenizer().decode(part) for part in parts if len(part)]


def test_every_document_is_on_one_side_whole(tmp_path: Path) -> None:
    texts = [f"document number {i} \u00e9\n" for i in range(100)]
    written, train, heldout = encoded(tmp_path, texts)
    assert sorted(train + heldout) == sorted(texts)
    assert (written.documents, written.heldout_documents) == (len(train), len(heldout))
    assert 10 <= len(heldout) <= 40
    assert written.train_bytes == sum(len(text.encode()) for text in train)
    assert written.train_tokens == written.train_bytes + len(train)
    assert written.heldout_tokens == written.heldout_bytes + len(heldout)


def test_equal_documents_never_lie_on_both_sides(tmp_path: Path) -> None:
    _, train, heldout = encoded(tmp_path, [f"text {i % 10}\n" for i in range(60)], fraction=0.5)
    assert heldout and train and not set(train) & set(heldout)


def test_small_batches_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document number {i}\n" for i in range(40)]
    whole = encoded(tmp_path, texts)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 30)
    (tmp_path / "again").mkdir()
    assert encoded(tmp_path / "again", texts) == whole


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_two_documents_lie_on_two_sides(tmp_path: Path, fraction: float) -> None:
    _, train, heldout = encoded(tmp_path, ["one", "two"], fraction)
    assert sorted(train + heldout) == ["one", "two"] and len(train) == len(heldout) == 1


def test_a_lone_document_is_held_out_by_its_tail(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(999))
    written, train, heldout = encoded(tmp_path, [text], fraction=0.02)
    assert train == [text[:980]] and heldout == [text[980:]]
    assert (written.train_bytes, written.heldout_bytes) == (980, 19)


def test_copies_of_one_document_leak_no_tail_into_training(tmp_path: Path) -> None:
    _, train, heldout = encoded(tmp_path, ["0123456789ABCDEFGHI"] * 3, fraction=0.5)
    assert "".join(train) == "0123456789" * 3 and heldout == ["ABCDEFGHI"] * 3


def test_unigram_entropy_by_hand() -> None:
    train, heldout = np.array([5, 2, 0]), np.array([3, 0, 1])
    expected = -(3 * math.log(6 / 10) + math.log(1 / 10)) / 4
    assert unigram_entropy(train, heldout) == pytest.approx(expected)


def test_unigram_entropy_of_a_uniform_text_is_the_logarithm_of_its_alphabet() -> None:
    counts = np.full(16, 1_000_000)
    assert unigram_entropy(counts, counts) == pytest.approx(math.log(16))


def test_the_content_digest_follows_the_text_not_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    first, second, other = (
        encoded(tmp_path / name, texts)[0].content_sha256
        for name, texts in (("a", ["one", "two"]), ("b", ["one", "two"]), ("c", ["one", "tow"]))
    )
    assert first == second != other


def test_all_documents_in_order_each_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(["one", "zw\u00f6lf", "three"]):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus(tmp_path)
    expected = [*b"one", 256, *"zw\u00f6lf".encode(), 256, *b"three", 256]
    assert encode_all(corpus, ByteTokenizer()).tolist() == expected
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 1)  # a document at a time
    assert encode_all(corpus, ByteTokenizer()).tolist() == expected
    assert encode_all(corpus, ByteTokenizer(), limit=4).tolist() == expected[:4]
    assert encode_all(corpus, ByteTokenizer(), limit=5).tolist() == expected[:11]


FRACTIONS = st.floats(0.001, 0.999)


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert digest(b"octavo") == 0xD275953A016AF1C1


def test_about_the_share_asked_for_is_held_out() -> None:
    digests = [digest(str(i).encode()) for i in range(20_000)]
    limit = threshold(digests, 0.02)
    assert limit is not None
    assert 340 <= sum(d < limit for d in digests) <= 460


@given(st.lists(st.integers(0, SPACE - 1), min_size=2, max_size=20), FRACTIONS)
def test_both_sides_get_a_document_wherever_contents_differ(digests: list[int], fraction: float) -> None:
    limit = threshold(digests, fraction)
    if len(set(digests)) == 1:
        assert limit is None
    else:
        assert limit is not None and min(digests) < limit <= max(digests)


@given(st.integers(2, 10_000), FRACTIONS)
def test_the_tail_leaves_a_token_on_each_side(length: int, fraction: float) -> None:
    assert 1 <= tail(length, fraction) <= length - 1


def test_the_tail_is_the_share_of_the_tokens() -> None:
    assert tail(1000, 0.02) == 980
