"""What a corpus is like: lengths, duplicates, entropy. Measured once, and kept beside its tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import strict
from octavo.data.tokenizer import Tokenizer, Tokens
from octavo.data.tokens import TokenFiles
from octavo.errors import ConfigError

FILE = "statistics-1.json"
"""In the folder of the token files. The number is raised whenever the same tokens would give other statistics."""
SAMPLE_TOKENS = 16_000_000
"""Tokens that are decoded to count bytes, at most."""
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusStatistics:
    """Of the training text."""

    documents: int
    """Documents, or parts of one."""
    tokens: int
    """Ids, ends of documents included."""
    document_tokens_mean: float
    """Mean length of a document in tokens, its end included."""
    document_tokens_percentiles: dict[str, int]
    """Length at which so many percent of the documents are no longer: `0`, `10`, `50`, `90`, `99`, `100`."""
    duplicate_documents: int
    """Documents whose tokens are, each and every one, those of an earlier document."""
    duplicate_tokens_share: float
    """Share of the tokens that lie in them."""
    distinct_tokens: int
    """Ids that occur."""
    token_entropy: float
    """Of the frequencies of the ids, in nats a token."""
    byte_entropy: float
    """Of the frequencies of the bytes of the UTF-8 text, in nats a byte."""
    bytes_per_token: float
    """Bytes of text a token, ends of documents counted as tokens."""
    bytes_sampled: int
    """Bytes that `byte_entropy` was counted on."""


def corpus_statistics(files: TokenFiles, tokenizer: Tokenizer) -> CorpusStatistics:
    """Return the statistics of some token files; measured the first time, then found beside them.

    A folder that cannot be written does not matter: they are measured again.
    """
    path = files.directory / FILE
    try:
        return strict.read(CorpusStatistics, strict.read_file(path), str(path))
    except ConfigError:  # not there, or of a process that was killed while it wrote
        found = measure(np.memmap(files.train, dtype="<u2", mode="r"), tokenizer, files.train_bytes)
    _keep(path, found)
    return found


def measure(ids: Tokens, tokenizer: Tokenizer, text_bytes: int) -> CorpusStatistics:
    """Measure ids, documents one after another, each closed by the end of document.

    `text_bytes` is the size of the text they stand for.
    """
    ends = _ends(ids, tokenizer.end_of_document)
    lengths = np.diff(ends, prepend=0)
    counts = np.zeros(1 << 16, dtype=np.int64)
    for start in range(0, len(ids), CHUNK):
        counts += np.bincount(ids[start : start + CHUNK], minlength=len(counts))
    repeated = _repeated(ids, ends)
    bytes_ = _byte_counts(ids, ends, tokenizer)
    marks = (0, 10, 50, 90, 99, 100)
    percentiles = np.percentile(lengths, marks, method="inverted_cdf")
    return CorpusStatistics(
        documents=len(ends),
        tokens=len(ids),
        document_tokens_mean=float(lengths.mean()),
        document_tokens_percentiles={str(mark): int(value) for mark, value in zip(marks, percentiles, strict=True)},
        duplicate_documents=int(repeated.sum()),
        duplicate_tokens_share=float(lengths[repeated].sum() / len(ids)),
        distinct_tokens=int((counts > 0).sum()),
        token_entropy=entropy(counts),
        byte_entropy=entropy(bytes_),
        bytes_per_token=text_bytes / len(ids),
        bytes_sampled=int(bytes_.sum()),
    )


def text_bytes(ids: Tokens, tokenizer: Tokenizer) -> int:
    """Return the bytes of UTF-8 text that ids stand for. A character that is cut at either end counts as U+FFFD."""
    bounds = _bounds(_ends(ids, tokenizer.end_of_document))
    return sum(len(tokenizer.decode(ids[start:end].tolist()).encode()) for start, end in bounds)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of what occurs so many times; 0 of nothing."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _ends(ids: Tokens, end_of_document: int) -> NDArray[np.int64]:
    """Return where each document ends, its end of document included; what lies past the last one is a document too."""
    found = [
        np.flatnonzero(ids[start : start + CHUNK] == end_of_document) + start + 1 for start in range(0, len(ids), CHUNK)
    ]
    ends = np.concatenate([np.zeros(0, dtype=np.int64), *found])
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))


def _repeated(ids: Tokens, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each document whether it is equal to an earlier one, by a digest of 128 bits."""
    seen: set[bytes] = set()
    repeated = np.zeros(len(ends), dtype=np.bool_)
    for number, (start, end) in enumerate(_bounds(ends)):
        digest = hashlib.blake2b(ids[start:end].tobytes(), digest_size=16).digest()
        repeated[number] = digest in seen
        seen.add(digest)
    return repeated


def _byte_counts(ids: Tokens, ends: NDArray[np.int64], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return how often each byte occurs, in documents taken evenly from the whole."""
    counts = np.zeros(256, dtype=np.int64)
    every = -(-len(ids) // SAMPLE_TOKENS)
    for start, end in list(_bounds(ends))[::every]:
        text = tokenizer.decode(ids[start : min(end, start + SAMPLE_TOKENS)].tolist())
        counts += np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=256)
    return counts


def _bounds(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)


def _keep(path: Path, statistics: CorpusStatistics) -> None:
    temporary = path.with_name(f".writing-{path.name}")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(statistics), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
