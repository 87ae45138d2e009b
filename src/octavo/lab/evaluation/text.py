"""The text of an evaluation: consecutive sequences of ids, the same for every precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo._util.config_reader import blaming, read_file
from octavo.errors import DataError
from octavo.lab.data.corpus import open_corpus
from octavo.lab.data.encode import encode_all
from octavo.lab.data.loader import FIRST, Batch, gather, open_tokens
from octavo.lab.data.statistics import text_bytes
from octavo.lab.data.tokenizer import Tokenizer, Tokens
from octavo.lab.train.config import RunConfig
from octavo.lab.train.setup import token_files


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceLayout:
    """Split of a text into sequences and batches."""

    sequence: int
    """Tokens per sequence."""
    rows: int
    """Sequences per batch, which share a per-tensor scale."""
    limit: int | None = None
    """Number of tokens, rounded up to a sequence; None for all."""
    separate: int | None = None
    """Id that ends documents, if attention is not to leave them (`octavo.lab.data.Loader`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalText:
    """Sequences of a text. Iteration yields batches `(inputs_BT, targets_BT)`; the last one may be smaller."""

    source: str
    """Name or path."""
    is_heldout: bool
    """True for a run's held-out text, False for a whole text."""
    ids: Tokens
    layout: SequenceLayout
    sequences: int
    bytes: int
    """Size of the targets as UTF-8 text; 0 for conversations, of which only answers are targets."""
    firsts: int = 0
    """Ids that are no targets: the first of separate documents, after the end of another."""

    @property
    def tokens(self) -> int:
        """Number of targets, over which losses are averaged."""
        return self.sequences * self.layout.sequence - self.firsts

    def __len__(self) -> int:
        return -(-self.sequences // self.layout.rows)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.sequences, self.layout.rows):
            windows = np.arange(start, min(start + self.layout.rows, self.sequences))
            yield gather(self.ids, windows, self.layout.sequence, self.layout.separate)


def heldout_text(config: RunConfig, tokenizer: Tokenizer, layout: SequenceLayout) -> tuple[EvalText, str]:
    """Return a run's held-out text, and a digest of its whole text.

    Raises:
        DataError: the text no longer exists, or less than a sequence is held out.
    """
    files = token_files(config, tokenizer)
    return _text(
        config.data.source, open_tokens(files.heldout), tokenizer, layout, is_heldout=True
    ), files.content_sha256


def whole_text(source: str, tokenizer: Tokenizer, layout: SequenceLayout) -> EvalText:
    """Return a whole text: a file, a folder, or a name known to `octavo.lab.data.read_corpus`.

    Raises:
        DataError: the text is missing, empty, or shorter than a sequence.
    """
    begin = None if layout.separate is None else tokenizer.begin_of_document
    wanted = None if layout.limit is None else layout.limit + layout.sequence + 1
    return _text(source, encode_all(open_corpus(source), tokenizer, wanted, begin), tokenizer, layout, is_heldout=False)


def trained_on(run: Path) -> str:
    """Return the digest of a run's training text; empty if its summary has none.

    Raises:
        ConfigError: the summary is malformed.
    """
    summary = run / "summary.json"
    if not summary.is_file():
        return ""
    with blaming(summary):
        return str(read_file(summary).get("corpus", {}).get("content_sha256", ""))


def _text(source: str, ids: Tokens, tokenizer: Tokenizer, layout: SequenceLayout, *, is_heldout: bool) -> EvalText:
    sequences = (len(ids) - 1) // layout.sequence
    if sequences == 0:
        raise DataError(
            f"{source}: {len(ids):,}{' held-out' if is_heldout else ''} tokens are fewer than one sequence of "
            f"{layout.sequence} plus one token. Give more text, or a shorter --sequence."
        )
    if layout.limit is not None:
        sequences = min(sequences, -(-layout.limit // layout.sequence))
    read = ids[1 : sequences * layout.sequence + 1]
    if layout.separate is not None:  # the first id of a document is no target
        read = read[ids[: len(read)] != layout.separate]
    size = 0 if np.any(read >= FIRST) else text_bytes(read, tokenizer)  # flagged: targets are parts of the text
    return EvalText(
        source=source,
        is_heldout=is_heldout,
        ids=ids,
        layout=layout,
        sequences=sequences,
        bytes=size,
        firsts=sequences * layout.sequence - len(read),
    )
