"""Checks of files before they are opened: their kind, and sizes and SHA-256 as an index holds them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError


def check_regular(path: Path) -> None:
    """Check before it is opened that a path is a file or a folder: a pipe blocks for ever, and a device may not end.

    Raises:
        OSError: it is something else, or there is nothing.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe, socket or device, not a file", str(path))


def file_entry(path: Path) -> dict[str, Any]:
    """Return `bytes` and `sha256` of a file."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_file(path: Path, entry: Mapping[str, Any], remedy: str = "") -> None:
    """Compare a file with its entry; without `sha256` only the size is compared.

    Args:
        path: the file.
        entry: as `file_entry` gives it.
        remedy: what to do about a damaged file, appended to the message.

    Raises:
        CheckpointError: the file cannot be read, is truncated or was changed.
    """
    try:
        check_regular(path)
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: truncated, {size} of {entry['bytes']} bytes.{remedy}")
        if "sha256" in entry and file_entry(path) != entry:
            raise CheckpointError(f"{path}: damaged: its SHA-256 is not the one in the checkpoint's index.{remedy}")
    except OSError as error:
        hint = remedy if isinstance(error, FileNotFoundError) else ""  # the others may pass, or be for want of rights
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).{hint}") from error


def check_names(names: Iterable[str]) -> None:
    """Check that an index names files of its own folder.

    Raises:
        ValueError: a name leads out of it.
    """
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"'{name}' leads out of the checkpoint")


def flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
