"""Tokenised text for `octavo bench parity --text FILE`: BPE ids of the documents in a folder, in one file.

Other studies read bytes of what a machine has installed. This text is made once, from a folder that none of them has
read, and carried to machines that have neither the folder nor the package `tokenizers`:

    python -m octavo_bench.bpe_text FOLDER text.npz --tokens 30000000
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cyclopts
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import ConfigError, DataError
from octavo.lab.data.bpe import BPETokenizer
from octavo_bench.installed_text import InstalledText, documents

VOCAB = 4096
SAMPLE = 32_000_000
"""Bytes of training text that merges are learned from."""
BATCH = 500
"""Documents per call of the tokenizer, whose results take a hundred bytes per token."""
_TRAIN, _HELDOUT = "train", "heldout "
"""Names of the arrays in a file; a held-out one is followed by its language."""


def write(folder: Path, file: Path, *, vocab: int = VOCAB, tokens: int | None = None, limit: int = 2**26) -> int:
    """Tokenise the documents of a folder by a BPE that is trained on them, and write a file for `--text`.

    Parameters
    ----------
    folder
        Folder with sources and documentation, as `installed_text` reads them.
    file
        The `.npz` file to write.
    vocab
        Number of ids, a multiple of 16 up to 32,752.
    tokens
        Maximum number of training tokens: the first by the hash of their documents.
    limit
        Maximum bytes of training text per language.
    """
    if vocab > np.iinfo(np.int16).max:
        raise ConfigError(f"--vocab {vocab}: ids are stored as int16. Give 32752 at most.")
    train, heldout = documents([folder], limit)
    ordered = [train[key].decode() for key in sorted(train)]
    count = int(np.searchsorted(np.cumsum([len(text) for text in ordered]), SAMPLE))
    tokenizer = BPETokenizer.train(ordered[: count + 1], vocab)
    ids = _encode(tokenizer, ordered)
    parts = {f"{_HELDOUT}{name}": _encode(tokenizer, [text.decode() for text in own]) for name, own in heldout.items()}
    sizes = sum(map(len, train.values())) + len(train)
    arrays: dict[str, Any] = {_TRAIN: ids[:tokens], **parts}
    np.savez_compressed(file, vocab=tokenizer.vocab, bytes_per_token=sizes / len(ids), **arrays)
    own = read(file)
    print(f"{file}: text {own.digest}, {len(own.train):,} tokens of {own.bytes_per_token:.3f} bytes, {own.vocab} ids")
    return 0


def read(file: Path) -> InstalledText:
    """Return the text of a file; its digest covers ids and vocabulary.

    Raises:
        DataError: the file is missing, or is not of this kind.
    """
    try:
        with np.load(file) as stored:
            arrays = {name: stored[name] for name in stored.files}
        vocab, size = int(arrays.pop("vocab")), float(arrays.pop("bytes_per_token"))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: no tokenised text ({error}). `python -m octavo_bench.bpe_text` writes one."
        ) from error
    digest = hashlib.blake2b(str(vocab).encode(), digest_size=6)
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    heldout: dict[str, Tensor] = {
        name.removeprefix(_HELDOUT): torch.from_numpy(ids) for name, ids in arrays.items() if name != _TRAIN
    }
    return InstalledText(torch.from_numpy(arrays[_TRAIN]), heldout, digest.hexdigest(), vocab, size)


def _encode(tokenizer: BPETokenizer, texts: Sequence[str]) -> NDArray[np.int16]:
    end = np.array([tokenizer.end_of_document], np.int16)
    batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    encoded = (ids.astype(np.int16) for batch in batches for ids in tokenizer.encode_batch(batch))
    return np.concatenate([part for ids in encoded for part in (ids, end)])


if __name__ == "__main__":
    cyclopts.run(write)
