"""The runs below a folder, by their path in it. What is not in that list cannot be opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from octavo.errors import StoreError, did_you_mean
from octavo.monitor.store import FILE, RunReader, find_runs

LOOK_EVERY = 2.0
"""Seconds for which the list of runs holds: a folder of checkpoints is not walked at each request."""


class Known(Protocol):
    """Runs that may be asked about."""

    @property
    def title(self) -> str:
        """What the list of them is called."""
        ...

    def names(self) -> list[str]:
        """Return their names."""
        ...

    def open(self, name: str) -> RunReader:
        """Return the reader of one."""
        ...


class Runs:
    """Readers of the runs at or below `root`, kept open; of any thread.

    Args:
        root: a folder of runs at any depth, or one run.

    Raises:
        StoreError: there is no such folder.
    """

    def __init__(self, root: str | Path) -> None:
        path = Path(root)
        self.root = (path.parent if path.is_file() else path).resolve()
        if not self.root.is_dir():
            raise StoreError(f"{path}: there is no such folder. Name a folder with runs in it, such as runs/.")
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._looked = -LOOK_EVERY
        self._readers: dict[str, tuple[tuple[int, int], RunReader]] = {}

    @property
    def title(self) -> str:
        """The folder's name."""
        return self.root.name

    def names(self) -> list[str]:
        """Return the runs, newest first, each by its path below the root; `.` is the root itself."""
        with self._lock:
            return list(self._look())

    def open(self, name: str) -> RunReader:
        """Return the reader of a run.

        Raises:
            StoreError: there is no such run below the root, or it cannot be read.
        """
        with self._lock:
            file = self._look().get(name)
            if file is None:
                raise StoreError(f"there is no run '{name}' here.{did_you_mean(name, self._found)}")
            return self._reader(name, file)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for _, reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _look(self) -> dict[str, Path]:
        if time.monotonic() - self._looked >= LOOK_EVERY:
            files = [folder / FILE for folder in find_runs(self.root)]
            inside = [file for file in files if file.resolve().is_relative_to(self.root)]  # no link leads out
            newest = sorted(inside, key=_changed, reverse=True)
            self._found = {file.parent.relative_to(self.root).as_posix(): file for file in newest}
            self._looked = time.monotonic()
        return self._found

    def _reader(self, name: str, file: Path) -> RunReader:
        """Return the open reader; a new one where the run was started over in another file."""
        if not file.is_file():
            raise StoreError(f"the run '{name}' is no longer there.")
        status = file.stat()
        identity = (status.st_dev, status.st_ino)
        known = self._readers.get(name)
        if known is None or known[0] != identity:
            if known is not None:
                known[1].close()
            self._readers[name] = known = (identity, RunReader(file))
        return known[1]


class Chosen:
    """Readers of runs that were named one by one, wherever they lie.

    Raises:
        StoreError: one is not there, or is named twice.
    """

    def __init__(self, runs: Sequence[str | Path]) -> None:
        readers = [RunReader(run) for run in runs]
        self._readers = dict(zip(_distinct([reader.path.parent for reader in readers]), readers, strict=True))

    @property
    def title(self) -> str:
        """Their names."""
        return ", ".join(self._readers)

    def names(self) -> list[str]:
        """Return their names, in the order given."""
        return list(self._readers)

    def open(self, name: str) -> RunReader:
        """Return the reader of one.

        Raises:
            StoreError: there is none of this name.
        """
        if name not in self._readers:
            raise StoreError(f"there is no run '{name}' here.{did_you_mean(name, self._readers)}")
        return self._readers[name]

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()


def _distinct(folders: Sequence[Path]) -> list[str]:
    """Return names of folders: the last part, or more of the path where that is not enough."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise StoreError("the same run is named twice. Name each once.")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]


def _changed(file: Path) -> float:
    """Return when a run was last written to, log included; 0 where it has just gone."""
    return max(
        (each.stat().st_mtime for each in (file, file.with_name(f"{file.name}-wal")) if each.exists()), default=0
    )
