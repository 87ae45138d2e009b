"""Text files and directories that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from octavo._util.checksums import flush
from octavo.errors import OctavoError

OLD = ".old-"
"""Prefix of a directory whose replacement is not yet in place."""


@contextmanager
def os_errors(path: object, kind: type[OctavoError], what: str = "cannot be written") -> Iterator[None]:
    """Raise an error of the system in this block as one of a kind, with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: {what} ({error.strerror}).") from error


def write_text(path: Path, text: str, kind: type[OctavoError], *, mkdir: bool = False) -> None:
    """Write a file atomically, through a temporary file next to it; with `mkdir`, create its folder.

    Raises:
        OctavoError: of this kind: the file cannot be written.
    """
    unfinished = path.with_name(f".writing-{path.name}-{uuid4().hex[:8]}")
    try:
        with os_errors(path, kind):
            if mkdir:
                path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a directory with all that is in it, or a link but not what it leads to; nothing if there is none.

    Raises:
        OSError: it is still there, whole or in part.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:  # another process removes it, too
        if os.path.lexists(path):
            raise


def put_in_place(finished: Path, final: Path) -> None:
    """Rename a finished directory, whose files are flushed, to `final` in the same folder; remove one that was there.

    That one is renamed to `.old-<name>` first, so that a process killed at any time leaves one of them whole.

    Raises:
        OSError: a directory cannot be renamed; what was there is there again. Or what was there cannot be removed; it
            is left as `.old-<name>`.
    """
    old = final.with_name(f"{OLD}{final.name}")
    flush(finished)
    if os.path.lexists(final):
        remove(old)
        final.rename(old)
    try:
        finished.rename(final)
    except OSError:
        with suppress(OSError):
            old.rename(final)
        raise
    flush(final.parent)
    remove(old)
