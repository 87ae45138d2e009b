"""Tokenizers: bytes, which need no package, and BPE, which needs `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import DataError, did_you_mean

Tokens = NDArray[np.unsignedinteger]
"""Ids: uint16, or uint32 for vocabularies of more than 65,536."""


class Tokenizer(Protocol):
    """The interface that `prepare` and training runs use."""

    @property
    def name(self) -> str:
        """Short name for tables and folders."""
        ...

    @property
    def vocab(self) -> int:
        """Size of the embedding, a multiple of 16; all ids are smaller."""
        ...

    @property
    def end_of_document(self) -> int:
        """The end-of-document id."""
        ...

    @property
    def begin_of_document(self) -> int | None:
        """The id that the tokenizer puts before a text (BOS); None if it puts none there."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that differs between tokenizers that could give different ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text without the end of document."""
        ...

    def encode_template(self, text: str) -> Tokens:
        """Return the ids of a text of a chat template, in which special tokens stand for their ids."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; end-of-document and padding ids are skipped."""
        ...


class ByteTokenizer:
    """The 256 byte values of UTF-8, and an end-of-document id.

    257 ids are in use. `vocab` is 272, the next multiple of 16, because FP8 GEMMs need dimensions divisible by 16; ids
    257 to 271 never occur.
    """

    name = "bytes"
    vocab = 272
    end_of_document = 256
    begin_of_document = None
    fingerprint = "bytes-1"

    def encode(self, text: str) -> Tokens:
        """Return the UTF-8 bytes of `text` as uint16."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    encode_template = encode

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; a truncated character becomes U+FFFD."""
        values = np.fromiter(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")


def load_tokenizer(name: str, *, source: str | Path | None = None, cache_dir: Path | None = None) -> Tokenizer:
    """Return the tokenizer called `name`.

    - `bytes`: `ByteTokenizer`.
    - a path that ends in `.json`: a BPE saved by `BPETokenizer.save`, or any `tokenizers` file.
    - `bpe-4096` (any size): a byte-level BPE trained on the text of `source` and cached in `cache_dir`.

    Raises:
        DataError: unknown name, missing or malformed file, or `tokenizers` is not installed.
        ConfigError: the size is not a multiple of 16 from 272 to 65,536.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.endswith(".json"):
        from octavo.lab.data.bpe import BPETokenizer

        return BPETokenizer.load(Path(name))
    kind, _, size = name.partition("-")
    if kind != "bpe" or not size.isdecimal():
        near = did_you_mean(name, ("bytes", "bpe-4096"))
        raise DataError(f"unknown tokenizer '{name}'.{near} Give 'bytes', 'bpe-<size>', or the path of a .json file.")
    if source is None or cache_dir is None:
        raise DataError(f"the tokenizer '{name}' is trained on a corpus: give a source and a cache folder.")
    from octavo.lab.data.bpe import trained

    return trained(source, int(size), cache_dir)
