"""Near duplicates against the Jaccard index, scripts, and what is judged."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from octavo.lab.data import ByteTokenizer, corpus_statistics, prepare
from octavo.lab.data.quality import BINS, Letters, judge, near_duplicates, signatures

WIDTH = 6


def documents(*texts: str) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])


def jaccard(one: str, other: str) -> float:
    a, b = ({text[i : i + WIDTH] for i in range(len(text) - WIDTH + 1)} for text in (one, other))
    return len(a & b) / len(a | b)


def noisy(text: str, changes: int, rng: random.Random) -> str:
    for _ in range(changes):
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice("abcdefghij") + text[place + 1 :]
    return text


def test_near_duplicates_are_those_of_a_high_jaccard_index(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghij", k=2000)) for _ in range(30)]
    similar = [noisy(text, 15, rng) for text in texts]
    other = [noisy(text, 250, rng) for text in texts]
    assert min(jaccard(a, b) for a, b in zip(texts, similar, strict=True)) > 0.85
    assert max(jaccard(a, b) for a, b in zip(texts, other, strict=True)) < 0.45
    found = near_duplicates(signatures(*documents(*texts, *similar, *other), WIDTH))
    assert not found[:30].any() and found[30:60].sum() >= 29 and not found[60:].any()
    whole = signatures(*documents(*texts), WIDTH)
    monkeypatch.setattr("octavo.lab.data.quality._CHUNK", 777)
    assert np.array_equal(signatures(*documents(*texts), WIDTH), whole)


@pytest.mark.parametrize("width", [1, 2, 5, 24])
def test_a_signature_has_the_least_hash_of_each_bin(width: int) -> None:
    ids, ends = documents("a quick brown fox jumps over the lazy dog, twice" * 3, "short", "another text of some words")
    mask, lowest = 2**64 - 1, [dict[int, int]() for _ in ends]
    for position in range(len(ids) - width + 1):
        document = int(np.searchsorted(ends, position, side="right"))
        if position + width <= ends[document]:
            mixed = 0
            for value in ids[position : position + width].tolist():
                mixed = (mixed * 0x9E3779B97F4A7C15 + value + 1) & mask
            mixed ^= mixed >> 31
            mixed = mixed * 0xBF58476D1CE4E5B9 & mask
            mixed ^= mixed >> 27
            found = lowest[document]
            found[mixed % BINS] = min(mixed, found.get(mixed % BINS, mask))
    expected = [[found.get(bin, mask) for bin in range(BINS)] for found in lowest]
    assert signatures(ids, ends, width).tolist() == expected


def test_short_documents_are_compared_by_what_they_have() -> None:
    found = near_duplicates(signatures(*documents("abc", "abc", "hello world", "hello world", "something else"), WIDTH))
    assert found.tolist() == [False, False, False, True, False]  # less than a shingle: nothing to compare


def test_letters_by_script() -> None:
    letters = Letters()
    for text in ("plain words, ümläut", "слово", "1 + 1 = 2", "漢字かな한국", "more words"):
        letters.add(text)
    assert (letters.documents, letters.empty, letters.foreign) == (5, 1, 2)
    assert next(iter(letters.shares)) == "Latin" and sum(letters.shares.values()) == pytest.approx(1)
    assert {"Cyrillic", "Han", "Kana", "Hangul"} < letters.shares.keys()


def test_a_poor_text_is_judged(tmp_path: Path) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh ", k=300)) for _ in range(60)]
    faults = [texts[0], texts[1], *(noisy(text, 2, rng) for text in texts[2:20]), "12 34 " * 9, "Привет, мир! " * 20]
    foreign = [f"слова номер {'абвгд'[i]} " * 4 for i in range(5)]
    for number, text in enumerate([*texts, *faults, *foreign, "x y " * 9000, "567 " * 70]):
        (tmp_path / f"{number}.txt").write_text(text)
    files = prepare(tmp_path, ByteTokenizer(), tmp_path / ".cache", heldout=0.1)
    found = corpus_statistics(files, ByteTokenizer())
    said = " ".join(text for text, _, _ in judge(vars_of(files) | vars_of(found)))
    for part in (
        "equal an earlier",
        "differ little",
        "are in the training text",
        "no letter",
        "another script",
        "tokens",
    ):
        assert part in said, part
    assert found.heldout_near_duplicates > 0 and found.duplicate_documents >= 1


def vars_of(instance: object) -> dict[str, object]:
    return {name: getattr(instance, name) for name in type(instance).__dataclass_fields__}  # type: ignore[attr-defined]


def test_a_good_text_and_an_old_record_are_not(tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("".join(rng.choices("abcdefgh ", k=300)))
    files = prepare(tmp_path, ByteTokenizer(), tmp_path / ".cache")
    assert [*judge(vars_of(corpus_statistics(files, ByteTokenizer())))] == []
    assert [*judge({})] == [] and [*judge({"documents": 5, "duplicate_documents": 0})] == []
