"""`console.log`: what a run prints, kept in its directory; its size is bounded."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from octavo._util.terminal import quantity

FILE = "console.log"
"""File name in a run's directory."""
LIMIT = 4 * 2**20
"""Largest size of the file in bytes. Beyond it lines in the middle go, so that half of it remains."""
HEAD = 64 * 2**10
"""Bytes at the beginning, which say how the run was started, that always stay."""
_NOTE = re.compile(rb"\[([\d,]+) lines? left out here: ")
"""What stands for the lines that are gone."""


class ConsoleFile:
    """A text file that a console writes to. What is written before `open` is held until then.

    A file that cannot be written is given up with a warning: a run does not end because of it.
    """

    def __init__(self, limit: int = LIMIT, head: int = HEAD) -> None:
        self._limit, self._head = limit, head
        self._path = Path()
        self._held: list[str] | None = []
        """None once the file is open or given up."""
        self._file: BinaryIO | None = None
        """Open for reading too: its content outlives its name."""

    def open(self, path: Path) -> None:
        """Append to the file at `path`."""
        if self._held is None:
            return
        self._path, held, self._held = path, self._held, None
        with self._giving_up():
            self._file = path.open("a+b")
        self.write("".join(held))

    def write(self, text: str) -> None:
        """Write text."""
        if self._held is not None:
            self._held.append(text)
        if self._file is None:
            return
        if self._path.parent.exists() and not self._path.exists():  # removed alone
            self.move(self._path)
        with self._giving_up():
            self._file.write(text.encode(errors="backslashreplace"))
            self._file.flush()
            if self._file.tell() > self._limit:
                self._shorten()

    def move(self, path: Path) -> None:
        """Go on in a new file at `path`, with all that is in this one, even if that was removed."""
        if self._file is not None:
            with self._giving_up():
                self._replace(path, self._content())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def flush(self) -> None:
        """Do nothing: every write is in the file."""

    def _shorten(self) -> None:
        """Take out lines behind the head, and the beginning of one that is longer than what stays."""
        content = self._content()
        first = content.rfind(b"\n", 0, self._head) + 1
        shortest = max(len(content) - self._limit // 2, first)
        last = content.find(b"\n", shortest) + 1
        if last in (0, len(content)):
            last = shortest
        gone = content.count(b"\n", first, last)
        if earlier := _NOTE.match(content, first):
            gone += int(earlier[1].replace(b",", b"")) - 1
        note = f"[{quantity(gone, 'line')} left out here: {self._path.name} is full]\n"
        self._replace(self._path, content[:first] + note.encode() + content[last:])

    def _content(self) -> bytes:
        assert self._file is not None
        self._file.seek(0)
        return self._file.read()

    def _replace(self, path: Path, content: bytes) -> None:
        """Replace the file at `path`, and go on there."""
        unfinished = path.with_name(f".writing-{path.name}")
        unfinished.write_bytes(content)
        unfinished.replace(path)
        self.close()
        self._path, self._file = path, path.open("a+b")

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            warnings.warn(
                f"{self._path}: cannot be written ({error.strerror}); the run goes on without it.", stacklevel=4
            )


def newest(file: BinaryIO, limit: int) -> tuple[str, int]:
    """Return the last whole lines of a console's file, at most `limit` bytes, and the number of bytes before them."""
    start = max(file.seek(0, os.SEEK_END) - limit, 0)
    file.seek(start)
    content = file.read(limit)
    if start:
        cut = content.find(b"\n") + 1
        start, content = start + cut, content[cut:]
    return content.decode(errors="replace"), start
