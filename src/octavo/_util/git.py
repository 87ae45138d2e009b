"""The commit of a working directory, read from Git's files.

Git itself runs programs that the configuration of a clone names (`core.fsmonitor`, filters, a pager): a folder of
somebody else would be executed by looking at it.
"""

from __future__ import annotations

import re
from pathlib import Path

from octavo._util.checksums import check_regular

_LIMIT = 1 << 20
"""Characters that are read of a file: `packed-refs` has some 60 per reference."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REFERENCE = re.compile(r"refs(?:/[^/\s\0\\]+)+")


def head_commit(folder: Path) -> str | None:
    """Return the first 12 digits of the commit that a folder's clone is at; None outside a clone, or if it has none.

    Reads HEAD, loose and packed references, also of linked worktrees and submodules. Whether files differ from the
    commit is not known.
    """
    for parent in (folder.absolute(), *folder.absolute().parents):
        if (directory := _git_directory(parent / ".git")) is not None:
            commit = _resolve(directory)
            return None if commit is None else commit[:12]
    return None


def _git_directory(place: Path) -> Path | None:
    """Return the directory of a clone at its `.git`: that itself, or what a file of a worktree or submodule names."""
    named = _text(place)
    if named.startswith("gitdir: "):
        place = place.parent / named.removeprefix("gitdir: ").strip()
    return place if _text(place / "HEAD") else None


def _resolve(directory: Path) -> str | None:
    common = directory / (_text(directory / "commondir").strip() or ".")
    value = _text(directory / "HEAD").strip()
    for _ in range(5):  # a reference may name another; Git follows five
        if _COMMIT.fullmatch(value):
            return value
        name = value.removeprefix("ref: ")
        if not _REFERENCE.fullmatch(name) or ".." in name:
            return None
        value = (_text(directory / name) or _text(common / name)).strip() or _packed(common, name)
    return None


def _packed(common: Path, name: str) -> str:
    for line in _text(common / "packed-refs").splitlines():
        commit, _, reference = line.partition(" ")
        if reference == name:
            return commit
    return ""


def _text(path: Path) -> str:
    """Return the beginning of a text file; empty if there is none."""
    try:
        check_regular(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LIMIT)
    except (OSError, ValueError):
        return ""
