"""The text of an evaluation: ids in sequences that follow each other, the same ones for every way of computing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.data.corpus import open_corpus
from octavo.data.encode import encode_all
from octavo.data.loader import Batch, gather, open_tokens
from octavo.data.statistics import text_bytes
from octavo.data.tokenizer import Tokenizer, Tokens
from octavo.data.tokens import prepare
from octavo.errors import DataError
from octavo.train.config import DataConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a text is cut into sequences."""

    sequence: int
    """Tokens in one."""
    rows: int
    """Sequences that are computed at once: with one scale for a whole tensor they share it."""
    limit: int | None = None
    """Tokens to look at, up to a sequence; None takes them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Sequences of a text. Going through it gives batches `(inputs_BT, targets_BT)`; the last one may be smaller."""

    source: str
    """A name or a path."""
    is_heldout: bool
    """Whether it is what a run held out of its text; else it is all of the text."""
    ids: Tokens
    cut: Cut
    sequences: int
    bytes: int
    """Of the UTF-8 text that the targets stand for."""

    @property
    def tokens(self) -> int:
        """Targets, which is what losses are a mean of."""
        return self.sequences * self.cut.sequence

    def __len__(self) -> int:
        return -(-self.sequences // self.cut.rows)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.sequences, self.cut.rows):
            windows = np.arange(start, min(start + self.cut.rows, self.sequences))
            yield gather(self.ids, windows, self.cut.sequence)


def heldout_text(data: DataConfig, tokenizer: Tokenizer, cut: Cut) -> tuple[Text, str]:
    """Return what a run holds out of its text, and a digest of all the text.

    Raises:
        DataError: the text is not there any more, or less than a sequence is held out.
    """
    files = prepare(data.source, tokenizer, data.cache.expanduser(), data.heldout)
    return _text(data.source, open_tokens(files.heldout), tokenizer, cut, is_heldout=True), files.content_sha256


def whole_text(source: str, tokenizer: Tokenizer, cut: Cut) -> Text:
    """Return all of a text: a file or a folder, or a name that `octavo.data.read_corpus` knows.

    Raises:
        DataError: it is missing, empty, or shorter than a sequence.
    """
    wanted = None if cut.limit is None else cut.limit + cut.sequence + 1
    return _text(source, encode_all(open_corpus(source), tokenizer, wanted), tokenizer, cut, is_heldout=False)


def trained_on(run: Path) -> str:
    """Return the digest of the text that a run has read; empty where its summary does not say."""
    summary = run / "summary.json"
    if not summary.is_file():
        return ""
    return str(json.loads(summary.read_text(encoding="utf-8")).get("corpus", {}).get("content_sha256", ""))


def _text(source: str, ids: Tokens, tokenizer: Tokenizer, cut: Cut, *, is_heldout: bool) -> Text:
    sequences = (len(ids) - 1) // cut.sequence
    if sequences == 0:
        raise DataError(
            f"{source}: {len(ids):,}{' held-out' if is_heldout else ''} tokens are fewer than one sequence of "
            f"{cut.sequence} and the token after it. Give more text, or a shorter --sequence."
        )
    if cut.limit is not None:
        sequences = min(sequences, -(-cut.limit // cut.sequence))
    size = text_bytes(ids[1 : sequences * cut.sequence + 1], tokenizer)
    return Text(source=source, is_heldout=is_heldout, ids=ids, cut=cut, sequences=sequences, bytes=size)
