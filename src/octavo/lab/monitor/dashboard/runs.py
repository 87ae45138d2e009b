"""The runs below some folders, by relative path, or those named one by one. No others can be opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo._util.terminal import printable
from octavo.errors import StoreError, did_you_mean
from octavo.lab.monitor.store import FILE, RunReader, find_runs
from octavo.lab.monitor.store.writer import file_of

RESCAN_SECONDS = 2.0
"""Seconds for which the list of runs is cached, so that requests need not walk the folder."""
QUERY_SECONDS = 10.0
"""Longest time of a query: a store too large to be shown must not block the others."""


class RunCollection:
    """Readers of runs by name, kept open; thread-safe.

    Args:
        title: of the collection.
        find: returns the file of each run by name.
    """

    def __init__(self, title: str, find: Callable[[], dict[str, Path]]) -> None:
        self.title = title
        self._find = find
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._scanned = -RESCAN_SECONDS
        self._readers: dict[str, tuple[tuple[int, int], RunReader]] = {}

    def names(self) -> list[str]:
        """Return the names of the runs."""
        with self._lock:
            return list(self._scan())

    def open(self, name: str) -> RunReader:
        """Return the reader of a run, a new one if its file was replaced.

        Raises:
            StoreError: no such run, or it cannot be read.
        """
        with self._lock:
            file = self._scan().get(name)
            if file is None:
                raise StoreError(f"no run '{name}' here.{did_you_mean(name, self._found)}")
            identity = (file.stat().st_dev, file.stat().st_ino) if file.is_file() else (0, 0)
            known = self._readers.get(name)
            if known is None or known[0] != identity:
                if known is not None:
                    known[1].close()
                self._readers[name] = known = (identity, RunReader(file, seconds=QUERY_SECONDS))
            return known[1]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for _, reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _scan(self) -> dict[str, Path]:
        if time.monotonic() - self._scanned >= RESCAN_SECONDS:
            self._found, self._scanned = self._find(), time.monotonic()
            for name in self._readers.keys() - self._found.keys():  # a deleted file takes room while it is open
                self._readers.pop(name)[1].close()
        return self._found


def runs_below(*folders: str | Path) -> RunCollection:
    """Return the runs at or below folders, such as those of a team's machines, newest first within each.

    A run is named by its path relative to the folder, `.` for the folder itself; behind the folder's name if there are
    several.

    Raises:
        StoreError: a folder does not exist, or is named twice.
    """
    roots = [(path.parent if path.is_file() else path).resolve() for path in map(Path, folders)]
    for path, root in zip(folders, roots, strict=True):
        if not root.is_dir():
            raise StoreError(f"{path}: no such folder. Name a folder with runs, such as runs/.")
    titles = _distinct(roots)
    prefixes = [f"{title}/" if len(roots) > 1 else "" for title in titles]

    def find() -> dict[str, Path]:
        found = {}
        for prefix, root in zip(prefixes, roots, strict=True):
            files = [folder / FILE for folder in find_runs(root)]
            inside = [file for file in files if file.resolve().is_relative_to(root)]  # no link may lead outside
            for file in sorted(inside, key=_changed, reverse=True):
                found[prefix + printable(file.parent.relative_to(root).as_posix())] = file
        return found

    return RunCollection(", ".join(titles), find)


def runs_named(*runs: str | Path) -> RunCollection:
    """Return runs named one by one, anywhere, in this order.

    Raises:
        StoreError: a run is named twice.
    """
    files = [file_of(run) for run in runs]
    named = dict(zip(_distinct([file.parent for file in files]), files, strict=True))
    return RunCollection(", ".join(named), lambda: named)


def _distinct(folders: Sequence[Path]) -> list[str]:
    """Return distinct names of folders: the last part, or as much of the path as needed."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise StoreError("the same run or folder is named twice. Name each once.")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return [printable("/".join(path.parts[-depth:])) for path in resolved]


def _changed(file: Path) -> float:
    """Return the time of the last write to a run, including its log; 0 if it was just deleted.

    An empty log is not a writer's: SQLite makes one for each reader, as this dashboard is.
    """
    log = file.with_name(f"{file.name}-wal")
    states = [each.stat() for each in (file, log) if each.exists()]
    return max((state.st_mtime for place, state in enumerate(states) if place == 0 or state.st_size), default=0)
