"""Text to tokens to batches: corpora, tokenizers, memory-mapped token files, a resumable loader.

    source -> read_corpus -> prepare (tokenize, split, write once) -> TokenFiles -> Loader, heldout_batches

Names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.lazy import lazy

if TYPE_CHECKING:
    from octavo.lab.data.bpe import BPETokenizer
    from octavo.lab.data.corpus import Document, read_corpus
    from octavo.lab.data.loader import Loader, heldout_batches
    from octavo.lab.data.statistics import CorpusStatistics, corpus_statistics
    from octavo.lab.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
    from octavo.lab.data.tokens import TokenFiles, prepare

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


_HOMES = {
    "bpe": "BPETokenizer",
    "corpus": "Document read_corpus",
    "loader": "Loader heldout_batches",
    "statistics": "CorpusStatistics corpus_statistics",
    "tokenizer": "ByteTokenizer Tokenizer load_tokenizer",
    "tokens": "TokenFiles prepare",
}
__getattr__ = lazy(__name__, _HOMES)
