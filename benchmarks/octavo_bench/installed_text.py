"""Text available on every machine: installed sources, headers and documentation, in four languages, as bytes.

A machine without a network has no corpus, but some hundred megabytes of these. Documents are deduplicated and ordered
by a hash of their content, so that the same files give the same text in any order of folders.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import DataError
from octavo.lab.data import ByteTokenizer
from octavo.lab.data.sources import FEWEST_LETTERS, LARGEST, LONGEST_LINE

LANGUAGES: Mapping[str, tuple[str, ...]] = {
    "python": (".py", ".pyi"),
    "c++": (".h", ".hpp", ".hh", ".hxx", ".cuh", ".cu", ".c", ".cc", ".cpp", ".cxx", ".inl", ".ipp", ".inc", ".tcc"),
    "english": (".md", ".rst", ".txt", "METADATA", "README"),
    "other": (".js", ".mjs", ".ts", ".css", ".html", ".pl", ".pm", ".sh", ".cmake", ".proto", ".lua", ".tcl", ".vim"),
}
"""Extensions of files by language; entries without a dot are whole names."""
HELDOUT_SHARE = 0.03
HELDOUT_BYTES = 2**20
"""Size of the held-out text per language: its first documents by hash, up to the one that reaches this."""
SKIPPED = frozenset({"__pycache__", ".git", "node_modules"})


@dataclass(frozen=True, slots=True)
class InstalledText:
    """Training text and held-out texts as token ids, int16, each document followed by the end-of-document id."""

    train: Tensor
    """All languages in one order, (tokens,)."""
    heldout: dict[str, Tensor]
    """By language."""
    digest: str
    """Twelve hexadecimal digits that identify training and held-out text."""
    vocab: int = ByteTokenizer.vocab
    """Number of ids, as the embedding of a model has them."""
    bytes_per_token: float = 1.0
    """Of the training text; a document's end counts as a byte."""

    def on(self, device: torch.device) -> InstalledText:
        """Return the text on a device."""
        heldout = {language: ids.to(device) for language, ids in self.heldout.items()}
        return replace(self, train=self.train.to(device), heldout=heldout)


def installed_text(roots: Iterable[Path] | None = None, limit: int | None = None) -> InstalledText:
    """Return the installed text.

    About 3 % of the documents of each language, selected by hash, are kept for the held-out texts.

    Args:
        roots: folders to read; by default those of `default_roots`.
        limit: bytes of training text per language; an eighth of it for held-out text.

    Raises:
        DataError: the folders have no training text or no held-out text.
    """
    return _as_bytes(*documents(default_roots() if roots is None else tuple(roots), limit))


TUNED = "english"
"""Language that a base model has not read, and is fine-tuned on."""


def tuning_texts(roots: Iterable[Path] | None = None, limit: int | None = None) -> tuple[InstalledText, InstalledText]:
    """Return the installed text of all other languages, and that of `TUNED`; both have the digest of all.

    Raises:
        DataError: one of the two has no training text or no held-out text.
    """
    folders = default_roots() if roots is None else tuple(roots)
    texts = [
        _as_bytes(*documents(folders, limit, languages))
        for languages in ([name for name in LANGUAGES if name != TUNED], [TUNED])
    ]
    digest = hashlib.blake2b("".join(text.digest for text in texts).encode(), digest_size=6).hexdigest()
    base, tuned = (replace(text, digest=digest) for text in texts)
    return base, tuned


def _as_bytes(train: Mapping[bytes, bytes], parts: Mapping[str, Sequence[bytes]]) -> InstalledText:
    heldout = {language: encode(texts) for language, texts in parts.items()}
    digest = hashlib.blake2b(b"".join(sorted(train)), digest_size=6)
    digest.update(b"".join(ids.numpy().tobytes() for ids in heldout.values()))
    return InstalledText(encode(train[key] for key in sorted(train)), heldout, digest.hexdigest())


def documents(
    roots: Sequence[Path], limit: int | None, languages: Iterable[str] = LANGUAGES
) -> tuple[dict[bytes, bytes], dict[str, list[bytes]]]:
    """Return the training documents by the hash of their content, and the held-out ones by language.

    Args:
        languages: those of `LANGUAGES` to read.
        limit: bytes of training text per language; an eighth of it for held-out text.

    Raises:
        DataError: the folders have no training text or no held-out text.
    """
    by_language: dict[str, dict[bytes, bytes]] = {language: {} for language in languages}
    for language, path in _files(roots, languages):
        text = _read(path)
        if text is not None:
            by_language[language].setdefault(hashlib.blake2b(text, digest_size=16).digest(), text)
    train: dict[bytes, bytes] = {}
    heldout: dict[str, list[bytes]] = {}
    for language, texts in by_language.items():
        ordered = sorted(texts)
        kept = [key for key in ordered if _is_heldout(key)]
        if first := _within(kept, texts, HELDOUT_BYTES if limit is None else min(HELDOUT_BYTES, limit // 8)):
            heldout[language] = [texts[key] for key in first]
        train |= {key: texts[key] for key in _within([k for k in ordered if not _is_heldout(k)], texts, limit)}
    if not train or not heldout:
        raise DataError(f"{', '.join(map(str, roots))}: too little text for training and for a held-out part.")
    return train, heldout


def default_roots() -> tuple[Path, ...]:
    """Return the folders of the standard library, of installed packages, of headers and of documentation."""
    paths = sysconfig.get_paths()
    named = (paths["stdlib"], paths["purelib"], paths["platlib"], "/usr/include", "/usr/local/cuda/include")
    found = dict.fromkeys(Path(name).resolve() for name in (*named, "/usr/share"))
    return tuple(path for path in found if path.is_dir())


def _files(roots: Iterable[Path], names_of: Iterable[str]) -> Iterator[tuple[str, Path]]:
    languages = {ending: language for language in names_of for ending in LANGUAGES[language]}
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED]
            for name in names:
                language = languages.get(Path(name).suffix or name)
                if language is not None:
                    yield language, Path(folder, name)


def _read(path: Path) -> bytes | None:
    """Return the bytes of a text file: UTF-8, not too large, no very long line, enough letters; None for others."""
    try:
        if path.is_symlink() or not 0 < path.stat().st_size <= LARGEST:
            return None
        text = path.read_bytes()
        text.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    values = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(values == ord("\n"))
    longest = int(np.diff(ends, prepend=-1, append=len(values)).max())
    return text if longest <= LONGEST_LINE and _IS_LETTER[values].mean() >= FEWEST_LETTERS else None


_IS_LETTER = np.array([chr(value).isalpha() or value >= 128 for value in range(256)])


def _is_heldout(key: bytes) -> bool:
    return int.from_bytes(key[:4], "big") < HELDOUT_SHARE * 2**32


def _within(keys: list[bytes], texts: Mapping[bytes, bytes], limit: int | None) -> list[bytes]:
    """Return the first keys, until their documents reach `limit` bytes."""
    if limit is None:
        return keys
    before = np.cumsum([0, *(len(texts[key]) for key in keys)])[:-1]
    return keys[: int(np.searchsorted(before, limit))]


def encode(texts: Iterable[bytes]) -> Tensor:
    """Return documents as byte ids, int16, each followed by the end-of-document id."""
    end = np.array([ByteTokenizer.end_of_document], np.int16)
    parts: list[NDArray[np.int16]] = []
    for text in texts:
        parts += [np.frombuffer(text, np.uint8).astype(np.int16), end]
    return torch.from_numpy(np.concatenate(parts))
