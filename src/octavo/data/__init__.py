"""Text to tokens to batches: corpora, tokenizers, memory-mapped token files, a resumable loader.

    source -> read_corpus -> prepare (tokenize, split, write once) -> TokenFiles -> Loader, heldout_batches

Names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.data.bpe import BPETokenizer
    from octavo.data.corpus import Document, read_corpus
    from octavo.data.loader import Loader, heldout_batches
    from octavo.data.statistics import CorpusStatistics, corpus_statistics
    from octavo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
    from octavo.data.tokens import TokenFiles, prepare

_HOME = {
    "BPETokenizer": "octavo.data.bpe",
    "ByteTokenizer": "octavo.data.tokenizer",
    "CorpusStatistics": "octavo.data.statistics",
    "Document": "octavo.data.corpus",
    "Loader": "octavo.data.loader",
    "TokenFiles": "octavo.data.tokens",
    "Tokenizer": "octavo.data.tokenizer",
    "corpus_statistics": "octavo.data.statistics",
    "heldout_batches": "octavo.data.loader",
    "load_tokenizer": "octavo.data.tokenizer",
    "prepare": "octavo.data.tokens",
    "read_corpus": "octavo.data.corpus",
}

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CorpusStatistics",
    "Document",
    "Loader",
    "TokenFiles",
    "Tokenizer",
    "corpus_statistics",
    "heldout_batches",
    "load_tokenizer",
    "prepare",
    "read_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo.data' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
