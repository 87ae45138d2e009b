"""Encode a corpus into a training and a held-out file. A hash decides the side, so equal texts share one."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from octavo.lab.data.corpus import Corpus
from octavo.lab.data.documents import Document
from octavo.lab.data.tokenizer import Tokenizer, Tokens

SPACE = 2**64


def digest(content: bytes) -> int:
    """Return a uniform 64-bit hash of `content`, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def threshold(digests: Sequence[int], fraction: float) -> int | None:
    """Return the digest below which a document is held out.

    It is `fraction` of the hash space, moved as little as needed for one document on each side. None if all contents
    are equal (a single document, for example): `tail` then splits within the document.
    """
    least, greatest = min(digests), max(digests)
    if least == greatest:
        return None
    return min(max(int(fraction * SPACE), least + 1), greatest)


def tail(length: int, fraction: float) -> int:
    """Return the start of the held-out tail of a single document of `length` tokens; neither part is empty."""
    return min(max(round(length * (1 - fraction)), 1), length - 1)


BATCH_CHARACTERS = 4_000_000
"""Characters tokenized per batch: enough for a parallel tokenizer, small enough for memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTotals:
    """Totals of a corpus that was encoded and split."""

    documents: int
    """Documents with a part in `train.bin`."""
    heldout_documents: int
    """Documents with a part in `heldout.bin`."""
    train_tokens: int
    """Ids in `train.bin`."""
    heldout_tokens: int
    """Ids in `heldout.bin`."""
    train_bytes: int
    """UTF-8 bytes of the training text."""
    heldout_bytes: int
    """UTF-8 bytes of the held-out text; with the loss it gives bits per byte, which is comparable across tokenizers."""
    unigram_entropy: float
    """Nats per held-out token of a model that knows only the frequency of each id: a baseline."""
    content_sha256: str
    """Digest of all texts in order: equal on machines with the same corpus."""
    overlong: int = 0
    """Conversations that were cut at the end of a sequence."""
    heldout_sources: tuple[tuple[str, int], ...] = ()
    """Sources of the held-out text (folders, or files of several documents) with the first token of each."""
    suffix: str = ".bin"
    """Suffix of the files: 16-bit ids in `.bin`, 32-bit ids in `.u32`."""

    @classmethod
    def of(cls, train: SideTotals, heldout: SideTotals, digests: Sequence[int], **more: Any) -> SplitTotals:
        """Return the totals of two sides, given the `digest` of each document in order."""
        return cls(
            documents=train.documents,
            heldout_documents=heldout.documents,
            train_tokens=train.tokens,
            heldout_tokens=heldout.tokens,
            train_bytes=train.bytes,
            heldout_bytes=heldout.bytes,
            unigram_entropy=unigram_entropy(train.counts, heldout.counts),
            content_sha256=hashlib.sha256(np.array(digests, dtype="<u8").tobytes()).hexdigest(),
            **more,
        )


def suffix_of(vocab: int) -> str:
    """Return the suffix of token files: 16-bit ids in `.bin`, 32-bit ids in `.u32`."""
    return ".bin" if vocab <= 1 << 16 else ".u32"


@dataclass
class SideTotals:
    """Totals of the training or the held-out text."""

    counts: NDArray[np.int64]
    """Number of targets by id."""
    documents: int = 0
    tokens: int = 0
    bytes: int = 0


class Side(SideTotals):
    """One of the two output files."""

    def __init__(self, stream: BinaryIO, vocab: int) -> None:
        """Write ids below `vocab` to `stream`."""
        super().__init__(np.zeros(vocab, dtype=np.int64))
        self.sources: list[tuple[str, int]] = []
        """Sources of the text with the first id of each."""
        self._stream = stream
        self._pending: list[Tokens] = []

    def add(self, ids: Tokens, size: int, source: str) -> None:
        """Add the ids of a document, or part of one, whose text has `size` bytes."""
        if not self.sources or self.sources[-1][0] != source:
            self.sources.append((source, self.tokens))
        self.tokens += len(ids)
        self.documents += 1
        self.bytes += size
        self._pending.append(ids)

    def flush(self) -> None:
        """Write and count the added ids."""
        if self._pending:
            ids = np.concatenate(self._pending)
            self._pending.clear()
            self.counts += np.bincount(ids, minlength=len(self.counts))
            self._stream.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())


def encode_split(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, fraction: float, begin: int | None = None
) -> SplitTotals:
    """Write `train.bin` and `heldout.bin` of `corpus` into `folder`; with `begin`, each document begins with that id.

    One pass is enough if the hash leaves documents on both sides. With few documents the limit may have to move, which
    takes a second pass; reading such corpora twice avoids keeping every corpus in memory.
    """
    limit = int(fraction * SPACE)
    digests, train, heldout = _pass(corpus, tokenizer, folder, fraction, limit, begin)
    moved = threshold(digests, fraction)
    if moved != limit:
        digests, train, heldout = _pass(corpus, tokenizer, folder, fraction, moved, begin)
    sources = tuple(heldout.sources) if len(heldout.sources) <= MOST_SOURCES else ()
    return SplitTotals.of(train, heldout, digests, heldout_sources=sources, suffix=suffix_of(tokenizer.vocab))


MOST_SOURCES = 64
"""Largest number of sources whose losses are recorded separately."""


def source_of(document: str) -> str:
    """Return the source of a document by its name: its first folder, or its file if that has several documents."""
    folder, slash, _ = document.partition("/")
    file, _, line = document.rpartition(":")
    return folder if slash else file if line.isdigit() else ""


def encode_all(corpus: Corpus, tokenizer: Tokenizer, limit: int | None = None, begin: int | None = None) -> Tokens:
    """Return the ids of all documents of `corpus`, each followed by the end of document, without a split.

    With `limit`, stops after the batch of documents that reaches that many ids. `begin` is as for `encode_split`.

    Raises:
        DataError: a file cannot be read, or contains no text.
    """
    found: list[Tokens] = []
    count = 0
    for batch in _batches(corpus.documents()):
        ids = tokenizer.encode_batch([document.text for document in batch])
        found += [_framed(each, tokenizer, begin) for each in ids]
        count += sum(map(len, ids)) + len(ids)
        if limit is not None and count >= limit:
            break
    return np.concatenate(found)


def unigram_entropy(train: NDArray[np.int64], heldout: NDArray[np.int64]) -> float:
    """Return the mean cross-entropy in nats of held-out ids under the training frequencies.

    `train` and `heldout` are counts per id. One is added to every training count, so that unseen ids cost a
    finite amount.
    """
    log_share = np.log(train + 1) - np.log((train + 1).sum())
    return float(-(heldout * log_share).sum() / heldout.sum())


def _pass(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, fraction: float, limit: int | None, begin: int | None
) -> tuple[array[int], Side, Side]:
    digests = array("Q")
    with (
        (folder / f"train{suffix_of(tokenizer.vocab)}").open("wb") as train_stream,
        (folder / f"heldout{suffix_of(tokenizer.vocab)}").open("wb") as heldout_stream,
    ):
        train, heldout = Side(train_stream, tokenizer.vocab), Side(heldout_stream, tokenizer.vocab)
        for batch in _batches(corpus.documents()):
            texts = [document.text for document in batch]
            for document, ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
                content, name = document.text.encode(), source_of(document.name)
                digests.append(digest(content))
                ids = _framed(ids, tokenizer, begin)
                if limit is None:  # equal documents are on both sides
                    cut = tail(len(ids), fraction)
                    head = round(len(content) * min(1, cut / max(1, len(ids) - 1)))  # its end has no bytes
                    train.add(ids[:cut], head, name)
                    heldout.add(ids[cut:], len(content) - head, name)
                else:
                    (heldout if digests[-1] < limit else train).add(ids, len(content), name)
            train.flush()
            heldout.flush()
    for side in (train, heldout) if begin is not None else ():
        side.counts[begin] = 0  # no target
    return digests, train, heldout


def _framed(ids: Tokens, tokenizer: Tokenizer, begin: int | None) -> Tokens:
    first = [] if begin is None else [begin]
    return np.concatenate([np.array(first, ids.dtype), ids, np.array([tokenizer.end_of_document], ids.dtype)])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
