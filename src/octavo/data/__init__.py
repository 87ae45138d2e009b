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

_MODULES = {
    "BPETokenizer": "bpe",
    "ByteTokenizer": "tokenizer",
    "CorpusStatistics": "statistics",
    "Document": "corpus",
    "Loader": "loader",
    "TokenFiles": "tokens",
    "Tokenizer": "tokenizer",
    "corpus_statistics": "statistics",
    "heldout_batches": "loader",
    "load_tokenizer": "tokenizer",
    "prepare": "tokens",
    "read_corpus": "corpus",
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
    if name not in _MODULES:
        raise AttributeError(f"module 'octavo.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"octavo.data.{_MODULES[name]}"), name)
