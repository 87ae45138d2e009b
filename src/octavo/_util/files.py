"""Text files that are written whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from octavo.errors import OctavoError


def write_text(path: Path, text: str, kind: type[OctavoError], *, mkdir: bool = False) -> None:
    """Write a file by way of another one beside it; with `mkdir`, make its folder.

    Raises:
        OctavoError: of this kind: the file cannot be written.
    """
    unfinished = path.with_name(f".writing-{path.name}-{uuid4().hex[:8]}")
    try:
        if mkdir:
            path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise kind(f"{path}: cannot be written ({error.strerror}).") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
