"""Corpus statistics: lengths, duplicates, scripts, entropy. Measured once and cached beside the token files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo._util import config_reader
from octavo._util.files import write_text
from octavo.errors import ConfigError, DataError
from octavo.lab.data.loader import FIRST, IDS, NO_TARGET, open_tokens
from octavo.lab.data.quality import SHINGLE_BYTES, SHINGLE_TOKENS, Letters, near_duplicates, signatures
from octavo.lab.data.tokenizer import Tokenizer, Tokens
from octavo.lab.data.tokens import TokenFiles

FILE = "statistics-3.json"
"""File in the token folder. The number increases whenever the same tokens would give other statistics."""
SAMPLE_TOKENS = 16_000_000
"""Largest number of tokens decoded to count bytes."""
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusStatistics:
    """Statistics of the training text."""

    documents: int
    """Documents, or parts of one."""
    tokens: int
    """Ids, including ends of documents."""
    document_tokens_mean: float
    """Mean length of a document in tokens, including its end."""
    document_tokens_percentiles: dict[str, int]
    """Length that a percentage of documents do not exceed: `0`, `10`, `50`, `90`, `99`, `100`."""
    duplicate_documents: int
    """Documents whose tokens equal those of an earlier document."""
    duplicate_tokens_share: float
    """Share of the tokens in duplicate documents."""
    near_duplicate_documents: int
    """Documents that differ little from an earlier one (`quality.near_duplicates`), without duplicates."""
    heldout_near_duplicates: int
    """Held-out documents that differ little from a training document, or not at all."""
    heldout_documents: int
    """Held-out documents compared."""
    empty_documents: int
    """Sampled documents without a letter."""
    foreign_documents: int
    """Sampled documents in another script than most letters of the text."""
    sampled_documents: int
    """Documents decoded to count bytes and letters."""
    scripts: dict[str, float]
    """Share of each script in the sampled letters."""
    distinct_tokens: int
    """Distinct ids that occur."""
    token_entropy: float
    """Entropy of id frequencies, in nats per token."""
    byte_entropy: float
    """Entropy of byte frequencies of the UTF-8 text, in nats per byte."""
    bytes_per_token: float
    """Bytes of text per token, including ends of documents."""
    bytes_sampled: int
    """Number of bytes counted for `byte_entropy`."""


def corpus_statistics(files: TokenFiles, tokenizer: Tokenizer) -> CorpusStatistics:
    """Return the statistics of token files, measured on first use and then cached beside them.

    If the folder is not writable they are measured each time.
    """
    path = files.directory / FILE
    try:
        return config_reader.read(CorpusStatistics, config_reader.read_file(path), str(path))
    except ConfigError:  # missing, or truncated by a killed process
        found = measure(open_tokens(files.train), tokenizer, files.train_bytes, open_tokens(files.heldout))
    with suppress(DataError):  # they are measured again next time
        write_text(path, json.dumps(dataclasses.asdict(found), indent=2) + "\n", DataError)
    return found


def measure(ids: Tokens, tokenizer: Tokenizer, text_bytes: int, heldout: Tokens | None = None) -> CorpusStatistics:
    """Measure the ids of consecutive documents, each followed by the end of document, or flagged (`loader.FIRST`).

    `text_bytes` is the size of their text. Near duplicates among `heldout` ids are counted, too.
    """
    ids, ends = _documents(ids, tokenizer)
    lengths = np.diff(ends, prepend=0)
    counts = np.zeros(tokenizer.vocab, dtype=np.int64)
    for start in range(0, len(ids), CHUNK):
        counts += np.bincount(ids[start : start + CHUNK], minlength=len(counts))
    repeated = _repeated(ids, ends)
    width = max(SHINGLE_TOKENS, round(SHINGLE_BYTES * len(ids) / max(text_bytes, 1)))
    own = signatures(ids, ends, width)
    near = near_duplicates(own) & ~repeated[: len(own)]
    other_ids, other_ends = _documents(heldout, tokenizer) if heldout is not None else (ids[:0], ends[:0])
    others = signatures(other_ids, other_ends, width)
    leaked = np.zeros(0, dtype=bool)
    if len(others):
        leaked = near_duplicates(np.concatenate([own, others]), among=len(own))[len(own) :]
    bytes_, letters = _sample(ids, ends, tokenizer)
    marks = (0, 10, 50, 90, 99, 100)
    percentiles = np.percentile(lengths, marks, method="inverted_cdf")
    return CorpusStatistics(
        documents=len(ends),
        tokens=len(ids),
        document_tokens_mean=float(lengths.mean()),
        document_tokens_percentiles={str(mark): int(value) for mark, value in zip(marks, percentiles, strict=True)},
        duplicate_documents=int(repeated.sum()),
        duplicate_tokens_share=float(lengths[repeated].sum() / len(ids)),
        near_duplicate_documents=int(near.sum()),
        heldout_near_duplicates=int(leaked.sum()),
        heldout_documents=len(others),
        empty_documents=letters.empty,
        foreign_documents=letters.foreign,
        sampled_documents=letters.documents,
        scripts=letters.shares,
        distinct_tokens=int((counts > 0).sum()),
        token_entropy=entropy(counts),
        byte_entropy=entropy(bytes_),
        bytes_per_token=text_bytes / len(ids),
        bytes_sampled=int(bytes_.sum()),
    )


def text_bytes(ids: Tokens, tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes that ids represent. A truncated character counts as U+FFFD."""
    bounds = _bounds(_ends(ids, tokenizer.end_of_document))
    return sum(len(tokenizer.decode(ids[start:end].tolist()).encode()) for start, end in bounds)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of a distribution given by counts; 0 if they are empty."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _ends(ids: Tokens, end_of_document: int) -> NDArray[np.int64]:
    """Return the end of each document, exclusive; ids after the last end of document count as a document."""
    found = [
        np.flatnonzero(ids[start : start + CHUNK] == end_of_document) + start + 1 for start in range(0, len(ids), CHUNK)
    ]
    ends = np.concatenate([np.zeros(0, dtype=np.int64), *found])
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))


def _documents(ids: Tokens, tokenizer: Tokenizer) -> tuple[Tokens, NDArray[np.int64]]:
    """Return plain ids and the end of each document; of packed ones without fillings."""
    if ids.dtype.itemsize == 2:
        return ids, _ends(ids, tokenizer.end_of_document)
    starts, plain = np.flatnonzero(ids & FIRST), ids & IDS
    if not len(starts):
        return plain, _ends(plain, tokenizer.end_of_document)
    ends = np.append(starts[1:], len(ids))
    is_kept = np.logical_or.reduceat((ids & NO_TARGET) == 0, starts)  # a filling has none
    return plain[np.repeat(is_kept, ends - starts)], np.cumsum((ends - starts)[is_kept])


def _repeated(ids: Tokens, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True per document that equals an earlier one, by a 128-bit digest."""
    seen: set[bytes] = set()
    repeated = np.zeros(len(ends), dtype=np.bool_)
    for number, (start, end) in enumerate(_bounds(ends)):
        digest = hashlib.blake2b(ids[start:end].tobytes(), digest_size=16).digest()
        repeated[number] = digest in seen
        seen.add(digest)
    return repeated


def _sample(ids: Tokens, ends: NDArray[np.int64], tokenizer: Tokenizer) -> tuple[NDArray[np.int64], Letters]:
    """Return the count of each byte value, and of letters, in evenly sampled documents."""
    counts, letters = np.zeros(256, dtype=np.int64), Letters()
    every = -(-len(ids) // SAMPLE_TOKENS)
    for start, end in list(_bounds(ends))[::every]:
        text = tokenizer.decode(ids[start : min(end, start + SAMPLE_TOKENS)].tolist())
        counts += np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=256)
        letters.add(text)
    return counts, letters


def _bounds(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    return zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
