"""Text files and directories that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
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


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A FIFO without a writer would block for ever, and a device might never end.

    Raises:
        OSError: there is none, it cannot be read, or it is a folder, FIFO, socket or device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file, but a pipe, socket or device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int = -1) -> bytes:
    """Return the bytes of a file, the first `limit` of them unless that is negative; errors as of `open_regular`."""
    with open_regular(path) as file:
        return file.read(limit)


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


def put_in_place(finished: Path, final: Path) -> None:
    """Rename a finished directory, whose files are flushed, to `final` in the same folder; remove one that was there.

    That one is renamed to `.old-<name>` first, so that a process killed at any time leaves one of them whole.

    Raises:
        OSError: a directory cannot be renamed; what was there is there again.
    """
    old = final.with_name(f"{OLD}{final.name}")
    flush(finished)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        finished.rename(final)
    except OSError:
        with suppress(OSError):
            old.rename(final)
        raise
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)
