"""Byte-level BPE with the package `tokenizers`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo._util.files import write_text
from octavo.errors import ConfigError, DataError
from octavo.lab.data.chat_template import begin_token
from octavo.lab.data.corpus import open_corpus
from octavo.lab.data.tokenizer import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_DOCUMENT = "<|endofdocument|>"
SMALLEST, LARGEST, WIDEST = 272, 65_536, 1 << 30
SAMPLE_BYTES = 64_000_000
"""Bytes of training text for merges; more changes them little and takes minutes."""
PIECE_CHARACTERS = 1_000_000


class BPETokenizer:
    """A byte-level BPE: any text can be encoded, and decodes to itself."""

    def __init__(self, backend: Backend) -> None:
        """Wrap a tokenizer of the package `tokenizers`; its own end-of-text token is used if it has one.

        Raises:
            DataError: it has no end-of-document token, or more than 2^30 ids.
        """
        ends = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>")
        found = [(i, token) for token in ends if (i := backend.token_to_id(token)) is not None]
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        if not found:
            raise DataError(f"the tokenizer has no end-of-document token; add one of {', '.join(ends)}.")
        if size > WIDEST:
            raise DataError(f"the tokenizer has {size} ids; token files hold {WIDEST} at most.")
        self.name = f"bpe-{size}"
        self.vocab = -(-size // 16) * 16
        self.end_of_document: int = found[0][0]
        self.end_token: str = found[0][1]
        self.begin_of_document = _begin(backend)
        backend.no_truncation()  # a tokenizer's file may say how its model was once called
        backend.no_padding()
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()
        backend.encode_special_tokens = True  # special tokens spelled out in a text are plain text
        self._backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int = 4096) -> BPETokenizer:
        """Learn `vocab` ids (bytes, merges, end of document) from `texts`. Deterministic.

        Repetitive texts may yield fewer merges: `vocab` of the result is the actual size.

        Raises:
            ConfigError: `vocab` is not a multiple of 16 from 272 to 65,536.
            DataError: `tokenizers` is not installed.
        """
        if vocab % 16 or not SMALLEST <= vocab <= LARGEST:
            raise ConfigError(f"tokenizer: vocab {vocab} is not a multiple of 16 from {SMALLEST} to {LARGEST}.")
        tokenizers = _package()
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Return the tokenizer of a `.json` file.

        Raises:
            DataError: the file is missing or malformed, or `tokenizers` is not installed.
        """
        tokenizers = _package()
        if not path.is_file():
            raise DataError(f"{path}: there is no such tokenizer file.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"{path}: not a tokenizer file ({error}).") from error
        tokenizer = cls(backend)
        if tokenizer.begin_of_document is None and (begin := begin_token(path)) is not None:
            tokenizer.begin_of_document = backend.token_to_id(begin)
        return tokenizer

    def to_json(self) -> str:
        """Return the content of a `.json` file of the package `tokenizers`."""
        text: str = self._backend.to_str()
        return text

    def save(self, path: Path) -> None:
        """Write a `.json` file that `load` and the package `tokenizers` read.

        Raises:
            DataError: the file cannot be written; no partial file remains.
        """
        write_text(path, self.to_json(), DataError, mkdir=True)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text without the end of document; uint16, or uint32 beyond 65,536 ids."""
        pieces = [list(_pieces(text)) for text in texts]
        encodings = iter(self._backend.encode_batch_fast(list(itertools.chain(*pieces)), add_special_tokens=False))
        return [self._tokens(i for _ in parts for i in next(encodings).ids) for parts in pieces]

    def encode_template(self, text: str) -> Tokens:
        """Return the ids of a text of a chat template, in which special tokens stand for their ids."""
        self._backend.encode_special_tokens = False
        try:
            return self._tokens(self._backend.encode(text, add_special_tokens=False).ids)
        finally:
            self._backend.encode_special_tokens = True

    def _tokens(self, ids: Iterable[int]) -> Tokens:
        return np.array([*ids], dtype=np.uint16 if self.vocab <= LARGEST else np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; end-of-document and padding ids are skipped."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
        return text


def trained(source: str | Path, vocab: int, cache_dir: Path) -> BPETokenizer:
    """Return the BPE of `vocab` ids for `source`, trained once and cached in `cache_dir`."""
    corpus = open_corpus(source)
    key = hashlib.sha256(f"{corpus.listing_sha256()} {vocab} {SAMPLE_BYTES}".encode()).hexdigest()[:12]
    path = cache_dir / f"bpe-{vocab}-{key}.json"
    if path.is_file():
        return BPETokenizer.load(path)
    tokenizer = BPETokenizer.train(_sample(corpus.documents(), corpus.size), vocab)
    tokenizer.save(path)
    return tokenizer


def _begin(backend: Backend) -> int | None:
    """Return the one id that a tokenizer's post-processor puts before a text; None if it puts none, or several."""
    text, framed = (backend.encode("a", add_special_tokens=with_more).ids for with_more in (False, True))
    return framed[0] if framed[1 : 1 + len(text)] == text and framed[: len(text)] != text else None


def _pieces(text: str) -> Iterator[str]:
    """Split a long text at line ends, so that all cores share one huge document."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end


def _sample(documents: Iterable[Any], size: int) -> Iterator[str]:
    """Yield every n-th text, so that about SAMPLE_BYTES are read, evenly over the corpus."""
    every = max(1, round(size / SAMPLE_BYTES))
    return (document.text for document in itertools.islice(documents, 0, None, every))


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError('a BPE tokenizer needs the package tokenizers: pip install "octavo[bpe]"') from error
    return tokenizers
