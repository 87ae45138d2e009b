"""Token files: a corpus, tokenized and split once, then memory-mapped by every run.

A folder contains `train.bin` and `heldout.bin` (uint16, little-endian, consecutive documents, each followed by the end
of document) and `meta.json`. Large vocabularies and chat data are in `.u32` (uint32). It is written atomically, and
reused while the corpus and the tokenizer stay the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from octavo._util import config_reader
from octavo._util.files import os_errors, remove
from octavo.errors import ConfigError, DataError
from octavo.lab.data.chat import ChatFormat, encode_chat
from octavo.lab.data.corpus import Corpus, open_corpus
from octavo.lab.data.encode import SplitTotals, encode_split
from octavo.lab.data.loader import width_of
from octavo.lab.data.tokenizer import Tokenizer

VERSION = 2
"""Increases whenever the same corpus and tokenizer would give other files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFiles(SplitTotals):
    """A tokenized corpus on disk, and its metadata."""

    directory: Path
    """Folder of the files."""
    source: str
    """The source as given."""
    tokenizer: str
    """Name of the tokenizer."""
    vocab: int
    """Size of the embedding."""
    heldout_share: float
    """The requested share of documents."""
    listing_sha256: str
    """Digest of names, sizes and modification times of the files."""

    @property
    def train(self) -> Path:
        """Path of the training tokens."""
        return self.directory / f"train{self.suffix}"

    @property
    def heldout(self) -> Path:
        """Path of the held-out tokens."""
        return self.directory / f"heldout{self.suffix}"

    @classmethod
    def read(cls, directory: Path) -> TokenFiles:
        """Return the token files that `prepare` wrote to `directory`.

        Raises:
            DataError: `meta.json` is missing or malformed, or a file does not have the recorded length.
        """
        try:
            meta = config_reader.read_file(directory / "meta.json")
            files = config_reader.read(cls, {**meta, "directory": directory}, str(directory / "meta.json"))
        except ConfigError as error:
            raise DataError(f"{directory}: not a folder of token files: {error}") from error
        for path, tokens in ((files.train, files.train_tokens), (files.heldout, files.heldout_tokens)):
            if not path.is_file() or path.stat().st_size != width_of(path) * tokens:
                raise DataError(f"{path}: missing or truncated; remove {directory} to prepare it again.")
        return files


def prepare(
    source: str | Path,
    tokenizer: Tokenizer,
    cache_dir: Path,
    heldout: float = 0.02,
    chat: ChatFormat | None = None,
    *,
    begin: int | None = None,
) -> TokenFiles:
    """Return the token files of `source`, written to `cache_dir` unless they exist.

    `source` is as for `read_corpus`. About the share `heldout` of the documents, selected by a hash of their content,
    is held out; at least one document is on each side, and a single document is split. `chat`: the source has
    conversations, see `octavo.lab.data.chat`. `begin`: id that each document begins with, as the tokenizer's
    `begin_of_document`; a chat template has its own.

    Raises:
        DataError: the source cannot be read, or the files cannot be written; no partial files remain.
        ConfigError: `heldout` is not between 0 and 1.
    """
    if not 0 < heldout < 1:
        raise ConfigError(f"heldout: {heldout} is not a share between 0 and 1 (0.02 holds out 2 %).")
    corpus = open_corpus(source)
    listing = corpus.listing_sha256()
    key = f"{VERSION} {listing} {tokenizer.fingerprint} {heldout!r}" + (f" {chat.fingerprint}" if chat else "")
    key += "" if begin is None else f" begin {begin}"
    directory = cache_dir / _folder_name(corpus, tokenizer, key)
    if (ready := _found(directory)) is not None:
        return ready
    with os_errors(cache_dir, DataError, "token files cannot be written here"):
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".writing-", dir=cache_dir, ignore_cleanup_errors=True)
    need = f"about {3 * corpus.size // 2**20 + 1} MiB are needed, and the token files could not be written"
    with scratch, os_errors(cache_dir, DataError, need):
        folder = Path(scratch.name, directory.name)
        folder.mkdir()
        if chat is None:
            written = encode_split(corpus, tokenizer, folder, heldout, begin)
        else:
            written = encode_chat(corpus, tokenizer, folder, heldout, chat)
        meta = {
            "source": corpus.source,
            "tokenizer": tokenizer.name,
            "vocab": tokenizer.vocab,
            **dataclasses.asdict(written),
            "heldout_share": heldout,
            "listing_sha256": listing,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        _publish(folder, directory)
    return TokenFiles.read(directory)


def _folder_name(corpus: Corpus, tokenizer: Tokenizer, key: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(corpus.source).name).strip("-")[:40]
    return f"{stem or 'corpus'}-{tokenizer.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _found(directory: Path) -> TokenFiles | None:
    """Return the token files in `directory`; None if they are missing or incomplete."""
    try:
        return TokenFiles.read(directory)
    except DataError:
        return None


def _publish(folder: Path, directory: Path) -> None:
    """Move the finished folder into place; if another process was first, its files are kept."""
    if directory.exists() and _found(directory) is None:
        remove(directory)
    try:
        folder.rename(directory)
    except OSError:
        if _found(directory) is None:
            raise
