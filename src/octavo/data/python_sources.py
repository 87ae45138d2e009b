"""Real text that every machine holds: the Python sources of the interpreter and of its installed packages."""

from __future__ import annotations

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.data.documents import Document, TextFile
from octavo.errors import DataError

TESTS = frozenset({"test", "tests", "idle_test"})
PACKAGES = frozenset({"site-packages", "dist-packages"})
LARGEST = 1_000_000
"""Bytes; larger files are generated."""
LONGEST_LINE = 1_000
"""Characters; a longer line is data, not code."""
FEWEST_LETTERS = 0.25
"""Share of letters; below it a file is a table of numbers."""


def standard_library() -> list[TextFile]:
    """Return the `.py` files of the standard library, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _unique(_walk(root, f"python{sys.version_info.major}.{sys.version_info.minor}", TESTS | PACKAGES))


def packages() -> list[TextFile]:
    """Return the `.py` files of all packages installed for this interpreter, sorted.

    In a virtual environment made with `--system-site-packages` the system's packages are included.
    """
    entries = [Path(entry) for entry in [*sys.path, *site.getsitepackages()] if Path(entry).name in PACKAGES]
    roots = dict.fromkeys(entry.resolve() for entry in entries if entry.is_dir())
    return _unique(file for root in roots for file in _walk(root, "packages", frozenset()))


def read_sources(files: Iterable[TextFile]) -> Iterator[Document]:
    """Yield the files that read as code: no copy of an earlier one, no data, not too large, UTF-8.

    Raises:
        DataError: none of them does.
    """
    seen: set[bytes] = set()
    for file in files:
        text = _code(file.path)
        if text is None:
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield Document(file.name, text)
    if not seen:
        raise DataError("no readable Python sources were found for this interpreter; give a folder of text instead.")


def looks_like_code(text: str) -> bool:
    """Return False for an empty text, a very long line, or few letters: the marks of a generated table."""
    if not text.strip() or max(map(len, text.splitlines())) > LONGEST_LINE:
        return False
    letters = sum(map(str.isalpha, text)) if not text.isascii() else _ascii_letters(text)
    return letters >= FEWEST_LETTERS * len(text)


def _ascii_letters(text: str) -> int:
    return len(text) - len(text.translate(_DROP_LETTERS))


_DROP_LETTERS = {code: None for code in range(128) if chr(code).isalpha()}


def _code(path: Path) -> str | None:
    try:
        if path.stat().st_size > LARGEST:
            return None
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if looks_like_code(text) else None


def _walk(root: Path, label: str, skip: frozenset[str]) -> Iterator[TextFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                yield TextFile(f"{label}/{path.relative_to(root).as_posix()}", path)


def _unique(files: Iterable[TextFile]) -> list[TextFile]:
    """Sort by name and drop what a symbolic link shows a second time, or is a broken one."""
    ordered = sorted(files, key=lambda file: (file.name, str(file.path)))
    first: dict[str, TextFile] = {}
    for file in ordered:
        if file.path.is_file():
            first.setdefault(os.path.realpath(file.path), file)
    return list(first.values())
