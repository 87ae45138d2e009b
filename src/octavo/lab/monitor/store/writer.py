"""Writing a run: one commit per step, so that committed data survives the process.

A `kill -9` loses no committed data. A power failure may lose the last seconds, since the file is not flushed to disk at
each commit, but never damages earlier data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from octavo._util.config_reader import blaming, shown
from octavo.errors import StoreError
from octavo.lab.monitor.store import schema
from octavo.lab.monitor.store.schema import TensorRow
from octavo.lab.monitor.store.series import Floats

Outcome = Literal["finished", "failed", "interrupted"]


class RunWriter:
    """Writer of a run store. One thread at a time.

    Args:
        path: the file, or its directory (for `run.sqlite`); created if missing.
        keep_until: append to an existing run, after deleting its records past this step.
        keep_events: number of the last event to keep, of those up to that step: what `Recorder.flush` returned there.
        overwrite: replace an existing run. Open readers see the new one.

    Raises:
        StoreError: the file contains a run and neither `keep_until` nor `overwrite` is given. From any method: the file
            cannot be written, or is from another program or a newer Octavo.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep_until: int | None = None,
        keep_events: int | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = file_of(path)
        self.first_step = keep_until or 0
        """Steps completed before."""
        self._rows: dict[tuple[str, str], int] = {}
        """Index in the file of each tensor that was ever measured."""
        self._order = np.zeros(0, dtype=np.int64)
        """Index in the file of each row of a snapshot."""
        self._span: _Span | None = None
        self._last = -1
        self._closed = False
        self._connection = self._open()
        self._begin(keep_until, keep_events, overwrite)

    # Documents and labels

    def write_document(self, name: str, content: Mapping[str, Any], *, step: int = 0) -> None:
        """Write a new version of one of `schema.DOCUMENTS`. NaN and infinities become null."""
        if name not in schema.DOCUMENTS:
            raise StoreError(f"{self.path}: unknown document '{name}'. Known: {', '.join(schema.DOCUMENTS)}.")
        with self.batch():
            self._execute(f"INSERT INTO {name} VALUES (?, ?, ?)", (step, time.time(), to_json(content)))

    def set_tensors(self, rows: Sequence[TensorRow | tuple[Any, ...]]) -> None:
        """Set the row labels of the following snapshots, each (layer, role) once.

        A tensor keeps its index in the file; tensors missing from now on read as NaN.
        """
        named = [row if isinstance(row, TensorRow) else TensorRow(*row) for row in rows]
        keys = [(row.layer, row.role) for row in named]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise StoreError(f"{self.path}: the tensor {twice[0]} / {twice[1]} appears twice.")
        with self.batch():
            indices = dict(self._rows)
            for row, key in zip(named, keys, strict=True):
                index = indices.setdefault(key, len(indices))
                values = (index, row.layer, row.role, row.operand, json.dumps(list(row.shape)))
                self._execute("INSERT OR REPLACE INTO tensors VALUES (?, ?, ?, ?, ?)", values)
            self._rows, self._order = indices, np.array([indices[key] for key in keys], dtype=np.int64)

    # Measurements and events

    def write_step(
        self,
        step: int,
        scalars: Mapping[str, float] | None = None,
        snapshot: ArrayLike | None = None,
        *,
        t: float | None = None,
    ) -> None:
        """Write the measurements of a step, in one commit.

        Args:
            step: steps completed. A scalar written again at the same step is replaced; snapshots must come in order.
            scalars: numbers by name. `time`, the wall clock, is added if missing.
            snapshot: float32 (tensors, statistics), rows as in `set_tensors`.
            t: time of measurement, seconds since 1970; by default now.
        """
        now = time.time() if t is None else t
        with self.batch():
            if scalars:
                values = {"time": now, **scalars}
                rows = [(step, key, float(value)) for key, value in values.items()]  # SQLite stores NaN as NULL
                self._execute("INSERT OR REPLACE INTO scalars VALUES (?, ?, ?)", rows, many=True)
            if snapshot is not None:
                self._write_snapshot(step, np.asarray(snapshot, dtype="<f4"), now)

    def write_event(self, step: int, rule: str, text: str, **details: Any) -> None:
        """Write an event, raised by `rule`.

        `details`: `level` (`info`, `warning` or `error`, by default `info`), `layer`, `role`, `value` and its `limit`,
        the `action` taken, and `t`, the time in seconds since 1970.
        """
        row = {"step": step, "t": time.time(), "level": "info", "rule": rule, "text": text, **details}
        if unknown := row.keys() - schema.columns("events"):
            raise TypeError(f"write_event: unknown details {', '.join(sorted(unknown))}.")
        if row["level"] not in ("info", "warning", "error"):
            raise StoreError(f"{self.path}: an event's level is info, warning or error, not '{row['level']}'.")
        row |= {key: float(row[key]) for key in ("value", "limit") if row.get(key) is not None}
        names, places = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
        with self.batch():
            self._execute(f"INSERT INTO events ({names}) VALUES ({places})", [*row.values()])

    def write_histograms(self, step: int, low: int, counts: ArrayLike) -> None:
        """Write element counts of all tensors by exponent, (tensors, bins), rows as in `set_tensors`.

        Bin i is 2^(low+i) <= |x| / scale < 2^(low+i+1). Empty bins at either end, rows of NaN or zeros are left out.
        """
        rows = []
        for index, bins in zip(self._order.tolist(), np.nan_to_num(np.asarray(counts)), strict=True):
            used = np.flatnonzero(bins)
            if len(used):
                kept = bins[used[0] : used[-1] + 1]
                rows.append((step, index, low + int(used[0]), kept.astype("<u4").tobytes()))
        with self.batch():
            self._execute("INSERT OR REPLACE INTO histograms VALUES (?, ?, ?, ?)", rows, many=True)

    def write_system(self, values: Mapping[str, float], *, t: float | None = None) -> None:
        """Write a reading of the machine."""
        with self.batch():
            self._execute("INSERT INTO system VALUES (?, ?)", (time.time() if t is None else t, to_json(values)))

    def newest_event(self) -> int:
        """Return the number of the last event; 0 if there is none."""
        return int(self._execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()[0])

    def cut(self, keep_until: int, *, keep_events: bool = False) -> None:
        """Delete the records past a step, to which the run goes back.

        Args:
            keep_events: keep events, which may give the reason for going back.
        """
        with self.batch():
            for table, column in schema.CUT.items():
                if keep_events and table == "events":
                    continue
                self._execute(f"DELETE FROM {table} WHERE {column} > ?", (keep_until,))
            self._span, self._last = None, min(self._last, keep_until)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Commit all writes within the block together; an exception rolls them back."""
        if not self._closed and self._connection.in_transaction:  # within another batch, which commits
            yield
            return
        before = self._rows, self._order, self._span, self._last  # each is replaced, never changed in place
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            self._rows, self._order, self._span, self._last = before
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def close(self, outcome: Outcome = "finished", text: str = "") -> None:
        """Write the outcome of the run and close the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            with self.batch():
                values = (time.time(), outcome, text, self._session)
                self._execute("UPDATE sessions SET ended = ?, outcome = ?, text = ? WHERE id = ?", values)
        finally:
            self._connection.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(*outcome_of(error))

    # Internals

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Another thread may write, as long as only one uses the connection.
            connection = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            if schema.is_empty(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                schema.create(connection, time.time())
            schema.check(connection, self.path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except (OSError, sqlite3.Error) as error:
            raise unusable(self.path, error, "written") from error
        return connection

    def _begin(self, keep_until: int | None, keep_events: int | None, overwrite: bool) -> None:
        with self.batch():
            if keep_until is not None:
                self.cut(keep_until)
                if keep_events is not None:
                    self._execute("DELETE FROM events WHERE id > ?", (keep_events,))
                self._take_over()
            elif overwrite:
                self._empty()
            elif self._execute("SELECT 1 FROM sessions LIMIT 1").fetchone():
                raise StoreError(
                    f"{self.path}: contains a run already. Continue it with resume_from=STEPS, replace it with"
                    " resume_from=0, or name another directory."
                )
            row = (time.time(), self.first_step, os.getpid())
            new = "INSERT INTO sessions (started, first_step, pid) VALUES (?, ?, ?)"
            self._session = self._execute(new, row).lastrowid

    def _empty(self) -> None:
        for table in schema.TABLES:
            if table.name != "meta":
                self._execute(f"DELETE FROM {table.name}")
        self._execute("UPDATE meta SET value = ? WHERE key = 'stats'", (json.dumps(schema.STATS),))
        self._execute("UPDATE meta SET value = ? WHERE key = 'created'", (repr(time.time()),))

    def _take_over(self) -> None:
        with blaming(self.path, StoreError):
            (stored,) = self._execute("SELECT value FROM meta WHERE key = 'stats'").fetchone()
            kept = tuple(json.loads(stored))
        if kept != schema.STATS:
            raise StoreError(
                f"{self.path}: has the statistics {shown(kept)}, but those to append are"
                f" {', '.join(schema.STATS)}. Start a new file."
            )
        tensors = self._execute("SELECT layer, role, idx FROM tensors ORDER BY idx").fetchall()
        self._rows = {(layer, role): index for layer, role, index in tensors}
        self._order = np.arange(len(self._rows))
        self._last = int(self._execute("SELECT COALESCE(MAX(step), -1) FROM telemetry").fetchone()[0])

    def _write_snapshot(self, step: int, values: Floats, now: float) -> None:
        shape = len(self._order), len(schema.STATS)
        if values.shape != shape:
            expected = f"{shape}: the tensors of set_tensors by {', '.join(schema.STATS)}"
            raise StoreError(f"{self.path}: a snapshot has the shape {expected}. Got {values.shape}.")
        if step <= self._last:
            raise StoreError(
                f"{self.path}: a snapshot of step {step} after step {self._last}; call cut({step - 1}) first."
            )
        placed = np.full((len(self._rows), len(schema.STATS)), np.nan, dtype="<f4")
        placed[self._order] = values
        self._execute("INSERT INTO telemetry VALUES (?, ?, ?, ?)", (step, now, 0, placed.tobytes()))
        self._last = step
        span = self._span.with_step(step, placed) if self._span else _Span(step, step, 1, placed, placed)
        self._span = span
        if span.steps == schema.SPAN:
            row = (0, span.first, span.last, span.steps, span.low.tobytes(), span.high.tobytes())
            self._execute("INSERT INTO telemetry_span VALUES (?, ?, ?, ?, ?, ?)", row)
            self._span = None

    def _execute(self, statement: str, values: Sequence[Any] = (), *, many: bool = False) -> sqlite3.Cursor:
        try:
            return (self._connection.executemany if many else self._connection.execute)(statement, values)
        except sqlite3.Error as error:
            raise unusable(self.path, error, "written") from error


class _Span(NamedTuple):
    """Minimum and maximum of the snapshots since the last row of `telemetry_span`."""

    first: int
    last: int
    steps: int
    low: Floats
    high: Floats

    def with_step(self, step: int, values: Floats) -> _Span:
        """Return the span with another snapshot, which may have more tensors."""
        missing = ((0, len(values) - len(self.low)), (0, 0))
        low, high = (np.pad(known, missing, constant_values=np.nan) for known in (self.low, self.high))
        return _Span(self.first, step, self.steps + 1, np.fmin(low, values), np.fmax(high, values))


def replace_document(directory: str | Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a new version of a document of a run that has ended.

    Raises:
        StoreError: there is no run, or it cannot be written.
    """
    path = file_of(directory)
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as connection, connection:
            table = schema.DOCUMENTS[schema.DOCUMENTS.index(name)]  # never another text
            last = f"SELECT COALESCE(MAX(step), 0), ?, ? FROM {table}"
            connection.execute(f"INSERT INTO {table} {last}", (time.time(), to_json(content)))
    except sqlite3.Error as error:
        raise unusable(path, error, "written") from error


def file_of(path: str | Path) -> Path:
    """Return the file of a run given by its file or its directory."""
    path = Path(path)
    return path if path.suffix == ".sqlite" else path / schema.FILE


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """Return the outcome of a run that ended with `error`, and the reason."""
    if error is None:
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ""
    return "failed", f"{type(error).__name__}: {error}"


def unusable(path: Path, error: Exception, what: str) -> StoreError:
    """Return the error for a file rejected by the system or SQLite."""
    if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
        return StoreError(f"{path}: not a run of Octavo, nor a SQLite file. Name another file, or remove it.")
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return StoreError(f"{path}: cannot be {what} ({reason}).")


def to_json(content: Mapping[str, Any]) -> str:
    """Return strict JSON: NaN and infinities become null, paths become text."""
    return json.dumps(plain(content), default=str, allow_nan=False)


def plain(value: Any) -> Any:
    """Return what JSON can hold: NaN and infinities become None, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
