"""The runs below a folder, by relative path, or those named one by one. No others can be opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from octavo._util.terminal import printable
from octavo.errors import StoreError, did_you_mean
from octavo.monitor.store import FILE, RunReader, find_runs
from octavo.monitor.store.writer import file_of

RESCAN_SECONDS = 2.0
"""Seconds for which the list of runs is cached, so that requests need not walk the folder."""
QUERY_SECONDS = 10.0
"""Longest time of a query: a store too large to be shown must not block the others."""


class RunCollection(Protocol):
    """Readers of runs, by name."""

    @property
    def title(self) -> str:
        """Title of the collection."""
        ...

    def names(self) -> list[str]:
        """Return the names of the runs."""
        ...

    def open(self, name: str) -> RunReader:
        """Return the reader of a run."""
        ...


class RunFolder:
    """Readers of the runs at or below `root`, kept open; thread-safe.

    Args:
        root: a folder with runs at any depth, or one run.

    Raises:
        StoreError: the folder does not exist.
    """

    def __init__(self, root: str | Path) -> None:
        path = Path(root)
        self.root = (path.parent if path.is_file() else path).resolve()
        if not self.root.is_dir():
            raise StoreError(f"{path}: no such folder. Name a folder with runs, such as runs/.")
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._scanned = -RESCAN_SECONDS
        self._readers: dict[str, tuple[tuple[int, int], RunReader]] = {}

    @property
    def title(self) -> str:
        """Name of the folder."""
        return self.root.name

    def names(self) -> list[str]:
        """Return the paths of the runs relative to the root, newest first; `.` is the root itself."""
        with self._lock:
            return list(self._scan())

    def open(self, name: str) -> RunReader:
        """Return the reader of a run.

        Raises:
            StoreError: no such run below the root, or it cannot be read.
        """
        with self._lock:
            file = self._scan().get(name)
            if file is None:
                raise StoreError(f"no run '{name}' here.{did_you_mean(name, self._found)}")
            return self._reader(name, file)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for _, reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _scan(self) -> dict[str, Path]:
        if time.monotonic() - self._scanned >= RESCAN_SECONDS:
            files = [folder / FILE for folder in find_runs(self.root)]
            inside = [file for file in files if file.resolve().is_relative_to(self.root)]  # no link may lead outside
            newest = sorted(inside, key=_changed, reverse=True)
            self._found = {printable(file.parent.relative_to(self.root).as_posix()): file for file in newest}
            self._scanned = time.monotonic()
        return self._found

    def _reader(self, name: str, file: Path) -> RunReader:
        """Return the open reader, or a new one if the file was replaced."""
        if not file.is_file():
            raise StoreError(f"the run '{name}' no longer exists.")
        status = file.stat()
        identity = (status.st_dev, status.st_ino)
        known = self._readers.get(name)
        if known is None or known[0] != identity:
            if known is not None:
                known[1].close()
            self._readers[name] = known = (identity, RunReader(file, seconds=QUERY_SECONDS))
        return known[1]


class RunFolders:
    """Readers of the runs below several folders, such as those of a team's machines, by folder and path.

    Raises:
        StoreError: a folder does not exist, or is named twice.
    """

    def __init__(self, roots: Sequence[str | Path]) -> None:
        folders = [RunFolder(root) for root in roots]
        self._folders = dict(zip(_distinct([folder.root for folder in folders]), folders, strict=True))

    @property
    def title(self) -> str:
        """Names of the folders."""
        return ", ".join(self._folders)

    def names(self) -> list[str]:
        """Return the names of the runs, newest first within each folder."""
        return [f"{folder}/{name}" for folder, runs in self._folders.items() for name in runs.names()]

    def open(self, name: str) -> RunReader:
        """Return the reader of a run.

        Raises:
            StoreError: no such run, or it cannot be read.
        """
        for folder, runs in self._folders.items():
            if name.startswith(f"{folder}/") and (inside := name[len(folder) + 1 :]) in runs.names():
                return runs.open(inside)
        raise StoreError(f"no run '{name}' here.{did_you_mean(name, self.names())}")

    def close(self) -> None:
        """Close all files."""
        for runs in self._folders.values():
            runs.close()


class RunSelection:
    """Readers of runs named one by one, anywhere.

    Raises:
        StoreError: a run is named twice.
    """

    def __init__(self, runs: Sequence[str | Path]) -> None:
        files = [file_of(run) for run in runs]
        self._names = _distinct([file.parent for file in files])
        self._readers: dict[str, RunReader] = {}
        self.failures: dict[str, StoreError] = {}
        """Errors of the runs that cannot be read, by name."""
        for name, file in zip(self._names, files, strict=True):
            try:
                self._readers[name] = RunReader(file, seconds=QUERY_SECONDS)
            except StoreError as error:
                self.failures[name] = error

    @property
    def title(self) -> str:
        """Names of the runs."""
        return ", ".join(self._names)

    def names(self) -> list[str]:
        """Return the names in the given order."""
        return self._names

    def readable(self) -> list[str]:
        """Return the names of the runs that can be opened."""
        return list(self._readers)

    def open(self, name: str) -> RunReader:
        """Return the reader of a run.

        Raises:
            StoreError: unknown name, or the run cannot be read.
        """
        if name in self.failures:
            raise self.failures[name]
        if name not in self._readers:
            raise StoreError(f"no run '{name}' here.{did_you_mean(name, self._readers)}")
        return self._readers[name]

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()


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
    """Return the time of the last write to a run, including its log; 0 if it was just deleted."""
    return max(
        (each.stat().st_mtime for each in (file, file.with_name(f"{file.name}-wal")) if each.exists()), default=0
    )
