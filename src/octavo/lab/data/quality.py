"""Quality of a text: near duplicates, scripts, and a judgement on its statistics.

Near duplicates are found by MinHash with one permutation (Li, Owen and Zhang 2012, arXiv 1208.1259) over shingles of
consecutive ids, and locality-sensitive hashing by bands of bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.lab.data.tokenizer import Tokens

SHINGLE_BYTES, SHINGLE_TOKENS = 24, 5
"""Width of a shingle in bytes of text, and its least width in ids."""
BINS, BANDS = 32, 8
"""Values of a signature, and groups of them of which one must agree."""
SIMILAR = 0.75
"""Share of equal bins from which documents are near duplicates; it estimates the Jaccard index of their shingles."""
MOST_DOCUMENTS = 1 << 20
"""Documents that are compared, the first ones."""
_CHUNK = 1 << 17
_ABSENT = np.uint64(2**64 - 1)

LIMITS = {
    "duplicates": 0.01,
    "near duplicates": 0.05,
    "held out": 0.02,
    "empty": 0.01,
    "foreign": 0.05,
    "overlong": 0.02,
    "longest": 0.1,
}
"""Shares beyond which a text is judged: of documents; `longest`: of the tokens, in one document."""

_SCRIPTS = {
    0x41: "Latin", 0x370: "Greek", 0x400: "Cyrillic", 0x530: "Armenian", 0x590: "Hebrew", 0x600: "Arabic",
    0x780: "other", 0x900: "Devanagari", 0x980: "other Indic", 0xE00: "Thai", 0xE80: "other", 0x10A0: "Georgian",
    0x1100: "Hangul", 0x1200: "other", 0x1E00: "Latin", 0x1F00: "Greek", 0x2000: "other", 0x3040: "Kana",
    0x3100: "other", 0x3400: "Han", 0xA000: "other", 0xAC00: "Hangul", 0xD7B0: "other", 0x20000: "Han",
    0x32000: "other",
}  # fmt: skip
"""First character of each block of letters."""
_STARTS = np.array([*_SCRIPTS])
_NAMES = [*_SCRIPTS.values()]


def signatures(ids: Tokens, ends: NDArray[np.int64], width: int) -> NDArray[np.uint64]:
    """Return the MinHash signatures (documents, BINS) of documents that end at `ends`, over shingles of `width` ids.

    A bin without a shingle is the largest number.
    """
    ends = ends[:MOST_DOCUMENTS]
    found = np.full(len(ends) * BINS, _ABSENT)
    for start in range(0, int(ends[-1]) if len(ends) else 0, _CHUNK):
        stop = min(start + _CHUNK, int(ends[-1]))
        part = np.asarray(ids[start : min(stop + width - 1, int(ends[-1]))], dtype=np.uint64)
        hashes = _shingles(part + np.uint64(1), width)
        if not len(hashes):
            break
        hashes ^= hashes >> np.uint64(31)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(27)
        first, last = np.searchsorted(ends, [start, start + len(hashes) - 1], side="right")
        for document in range(first, last + 1):  # a shingle lies in one document
            begin = int(ends[document - 1]) if document else 0
            own = hashes[max(begin - start, 0) : max(int(ends[document]) - width + 1 - start, 0)]
            lowest = found[document * BINS : (document + 1) * BINS]
            np.minimum.at(lowest, (own % np.uint64(BINS)).astype(np.int64), own)
    return found.reshape(len(ends), BINS)


def _shingles(values: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """Return a polynomial hash of each `width` consecutive values, from those of half as many."""
    if len(values) < width:
        return values[:0]
    if width == 1:
        return values
    half = width // 2
    left = _shingles(values, width - half)
    right = left if 2 * half == width else _shingles(values, half)
    count = len(values) - width + 1
    made: NDArray[np.uint64] = left[:count] * np.uint64(pow(0x9E3779B97F4A7C15, half, 2**64))
    made += right[width - half : width - half + count]
    return made


def near_duplicates(signed: NDArray[np.uint64], among: int | None = None) -> NDArray[np.bool_]:
    """Return True per document that is similar to an earlier one, by their signatures.

    Args:
        among: number of documents at the beginning that count as earlier ones; by default all.
    """
    among = len(signed) if among is None else among
    found = np.zeros(len(signed), dtype=np.bool_)
    known = signed != _ABSENT
    for band in np.split(np.arange(BINS), BANDS):
        keys = np.ascontiguousarray(signed[:, band]).view(np.dtype((np.void, 8 * len(band)))).ravel()
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        earlier = first[group]
        pairs = np.flatnonzero((earlier < np.minimum(np.arange(len(signed)), among)) & known[:, band].any(1) & ~found)
        either = known[pairs] | known[earlier[pairs]]
        equal = (signed[pairs] == signed[earlier[pairs]]) & either
        found[pairs] = equal.sum(1) >= SIMILAR * either.sum(1)
    return found


class Letters:
    """Counts of letters by script, over documents."""

    def __init__(self) -> None:
        self.documents = self.empty = 0
        self._letters: Counter[str] = Counter()
        self._documents: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count a document."""
        self.documents += 1
        points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
        letters = points[((points | 32) - 97 < 26) | (points >= 0xC0)]
        if not len(letters):
            self.empty += 1
            return
        counts = np.bincount(np.searchsorted(_STARTS, letters, side="right") - 1, minlength=len(_NAMES))
        found: Counter[str] = Counter()
        for name, count in zip(_NAMES, counts.tolist(), strict=True):
            found[name] += count
        self._letters += found
        self._documents[found.most_common(1)[0][0]] += 1

    @property
    def shares(self) -> dict[str, float]:
        """Share of each script, largest first."""
        return {name: count / self._letters.total() for name, count in self._letters.most_common() if count}

    @property
    def foreign(self) -> int:
        """Documents in another script than most letters."""
        return self._documents.total() - (self._documents[next(iter(self.shares))] if self._letters else 0)


def judge(corpus: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield findings about a text: a sentence, the share and its limit.

    Args:
        corpus: fields of `CorpusStatistics` and `TokenFiles`, as a run's store has them; missing ones are not judged.
    """
    for name, (count, of, what) in _JUDGED.items():
        found, among = corpus.get(count, 0), corpus.get(of, 0)
        if found > LIMITS[name] * among:
            yield f"{found:,} of {among:,} {what}", found / among, LIMITS[name]
    longest = corpus.get("document_tokens_percentiles", {}).get("100", 0) / corpus.get("tokens", 1)
    if corpus.get("documents", 0) > 1 and longest > LIMITS["longest"]:
        yield f"one document has {100 * longest:.0f} % of the tokens", longest, LIMITS["longest"]


_JUDGED = {
    "duplicates": ("duplicate_documents", "documents", "documents equal an earlier one"),
    "near duplicates": ("near_duplicate_documents", "documents", "documents differ little from an earlier one"),
    "held out": ("heldout_near_duplicates", "heldout_documents", "held-out documents are in the training text"),
    "empty": ("empty_documents", "sampled_documents", "documents have no letter"),
    "foreign": ("foreign_documents", "sampled_documents", "documents are in another script than the text"),
    "overlong": ("overlong", "documents", "conversations are longer than a sequence, and cut"),
}
"""Counts that are judged, the count that each is a share of, and what it means."""
