"""Reading a run, also while it is being written. Readers change nothing and never block the writer."""

from __future__ import annotations

import itertools
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from octavo._util.config_reader import blaming, shown
from octavo.errors import StoreError, did_you_mean
from octavo.lab.monitor.store import schema
from octavo.lab.monitor.store.schema import TensorRow
from octavo.lab.monitor.store.series import Floats, Series, Steps, gaps
from octavo.lab.monitor.store.writer import file_of, unusable

JOULES_PER_KWH = 3.6e6
_FOREVER = 2**62


class Session(NamedTuple):
    """A process that wrote the run."""

    started: float
    """Seconds since 1970."""
    ended: float | None
    """Seconds since 1970; None while it runs or if it was killed."""
    outcome: str | None
    """`finished`, `failed` or `interrupted`; None if `ended` is None."""
    text: str
    """Reason of a failure."""
    first_step: int
    """Steps completed before the session."""
    pid: int
    """Process id."""


class RunEvent(NamedTuple):
    """A recorded event."""

    id: int
    step: int
    t: float
    level: str
    rule: str
    layer: str | None
    role: str | None
    value: float | None
    limit: float | None
    action: str | None
    text: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One statistic of one role: one row per layer, one column per bucket of steps."""

    layers: tuple[str, ...]
    """(L,) full names in model order."""
    first: Steps
    """(B,) step of the first snapshot per column."""
    last: Steps
    """(B,) step of the last snapshot."""
    values: Floats
    """(L, B) maximum or minimum per bucket; NaN without measurements."""


class RunReader:
    """Reader of a run store; thread-safe.

    Properties and methods return what is committed at the time of the call, so that a live run shows more each time.

    Args:
        path: the file, or the directory of the run.
        seconds: longest time of a query, for readers of many runs; by default unlimited.

    Raises:
        StoreError: there is no run, or the file is damaged, from another program or a newer Octavo. From any method:
            the file cannot be read, or a query takes longer than `seconds`.
    """

    def __init__(self, path: str | Path, *, seconds: float | None = None) -> None:
        self.path = file_of(path)
        self._lock = threading.Lock()
        self._seconds, self._deadline = seconds, math.inf
        self._connection = self._open()
        self.stats = self._stats()
        """Column names of a snapshot."""

    # Documents and state

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.path.parent.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The configuration; empty if none was written."""
        return self.document("config")

    def settings(self, section: str) -> dict[str, Any]:
        """Return a section of the configuration, such as `run` or `model`; empty if there is none."""
        found = self.config.get(section)
        return found if isinstance(found, dict) else {}

    @property
    def env(self) -> dict[str, Any]:
        """Versions and device."""
        return self.document("env")

    @property
    def plan(self) -> dict[str, Any]:
        """The conversion plan, as in `Plan.to_json`."""
        return self.document("plan")

    @property
    def corpus(self) -> dict[str, Any]:
        """Statistics of the text."""
        return self.document("corpus")

    @property
    def summary(self) -> dict[str, Any]:
        """The results; empty until the run has finished."""
        return self.document("summary")

    def document(self, name: str, *, first: bool = False) -> dict[str, Any]:
        """Return the newest version of one of `schema.DOCUMENTS`, or the first one; empty if there is none."""
        if name not in schema.DOCUMENTS:
            raise StoreError(f"{self.path}: unknown document '{name}'.{did_you_mean(name, schema.DOCUMENTS)}")
        order = "ASC" if first else "DESC"
        found = self._all(f"SELECT json FROM {name} ORDER BY rowid {order} LIMIT 1")
        return dict(json.loads(found[0][0])) if found else {}

    @property
    def sessions(self) -> list[Session]:
        """The processes that wrote the run, in order."""
        rows = self._all("SELECT started, ended, outcome, text, first_step, pid FROM sessions ORDER BY id")
        return [Session(*row) for row in rows]

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """The times between sessions, when no process trained: from and to, in seconds since 1970.

        A session that was killed ended with the last step that it recorded.
        """
        found, sessions = [], self.sessions
        for before, after in itertools.pairwise(sessions):
            query = "SELECT MAX(value) FROM scalars WHERE key = 'time' AND value < ?"
            (recorded,) = self._all(query, (after.started,))[0]
            ended = before.ended or max(recorded or 0.0, before.started)
            found.append((min(ended, after.started), after.started))
        return found

    @property
    def duration(self) -> float:
        """Seconds in which a process trained, until the last write."""
        paused = sum(to - since for since, to in self.pauses)
        return max(self.heartbeat - self.sessions[0].started - paused, 0.0)

    @property
    def heartbeat(self) -> float:
        """Time of the last write, in seconds since 1970."""
        newest = "SELECT value FROM scalars WHERE key = 'time' ORDER BY step DESC LIMIT 1"
        times = [
            *self._all(newest),
            *self._all("SELECT t FROM telemetry ORDER BY step DESC LIMIT 1"),
            *self._all("SELECT t FROM events ORDER BY id DESC LIMIT 1"),
            *self._all("SELECT MAX(t) FROM system"),
            *self._all("SELECT MAX(MAX(started), COALESCE(MAX(ended), 0)) FROM sessions"),
        ]
        return max((t for (t,) in times if t is not None), default=0.0)

    def state(self, *, silent_after: float = 120.0) -> str:
        """Return `running`, `finished`, `failed` or `interrupted`; `silent` if not written to for a while.

        A killed run is silent: it could not record its end.

        Args:
            silent_after: seconds without a write.
        """
        last = self.sessions[-1]
        if last.outcome is not None:
            return last.outcome
        return "running" if time.time() - self.heartbeat < silent_after else "silent"

    def version(self) -> int:
        """Return a number that changes with every write: poll it to follow a run."""
        return int(self._all("PRAGMA data_version")[0][0])

    @property
    def last_step(self) -> int:
        """Steps completed; 0 before the first is written."""
        newest = [self._all(f"SELECT MAX(step) FROM {table}")[0][0] for table in ("scalars", "telemetry")]
        return max((step for step in newest if step is not None), default=0)

    # Scalars, system readings, events

    def keys(self) -> list[str]:
        """Return the names of the scalars."""
        return [key for (key,) in self._all("SELECT DISTINCT key FROM scalars ORDER BY key")]

    def scalar(self, key: str, *, first: int = 0, last: int | None = None, points: int | None = None) -> Series:
        """Return one scalar from step `first` to `last`, inclusive; empty if the name is unknown.

        At most `points` points to draw; by default all.
        """
        return self.scalars([key], first=first, last=last, points=points)[key]

    def scalars(
        self,
        keys: Iterable[str] | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        points: int | None = None,
    ) -> dict[str, Series]:
        """Return several scalars, by default all, each as `scalar` does."""
        wanted = None if keys is None else list(keys)
        chosen = "" if wanted is None else f" AND key IN ({', '.join('?' * len(wanted))})"
        where = f"FROM scalars WHERE step BETWEEN ? AND ?{chosen}"
        given = (first, _FOREVER if last is None else last, *(wanted or []))
        query = f"SELECT key, step, step, value, value {where} ORDER BY step"
        if points is not None:
            low, high = self._all(f"SELECT MIN(step), MAX(step) {where}", given)[0]
            if low is not None and high - low >= points:
                # Merged by SQLite, so that a long run takes no more memory here than a short one.
                bucket = f"(step - {low}) * {max(points // 2, 1)} / {high - low + 1}"
                columns = "MIN(step), MAX(step), MIN(value), MAX(value)"
                query = f"SELECT key, {columns} {where} GROUP BY key, {bucket} ORDER BY MIN(step)"
        found: dict[str, list[tuple[Any, ...]]] = {key: [] for key in wanted or []}
        for key, *bucket_of in self._all(query, given):
            found.setdefault(key, []).append(tuple(bucket_of))
        return {key: Series.of(rows) for key, rows in sorted(found.items())}

    def system(self, *, first: float = 0.0, last: float | None = None) -> list[dict[str, float]]:
        """Return the system readings between two times (seconds since 1970), each with its time `t`."""
        rows = self._all(
            "SELECT t, json FROM system WHERE t BETWEEN ? AND ? ORDER BY t", (first, _FOREVER if last is None else last)
        )
        return [{"t": t, **json.loads(values)} for t, values in rows]

    def energy(self) -> list[list[tuple[float, float]]]:
        """Return the time (seconds since 1970) and joules of each energy reading of one GPU, by session.

        The counter restarts with each session.
        """
        sessions: list[list[tuple[float, float]]] = []
        for row in self.system():
            if (joules := row.get("gpu_energy_joules")) is not None:
                if not sessions or joules < sessions[-1][-1][1]:
                    sessions.append([])
                sessions[-1].append((row["t"], joules))
        return sessions

    def energy_kwh(self) -> float | None:
        """Return the energy of one GPU over all sessions; None if it was not measured."""
        sessions = self.energy()
        return sum(session[-1][1] for session in sessions) / JOULES_PER_KWH if sessions else None

    def events(
        self,
        *,
        after: int = 0,
        level: str | None = None,
        rule: str | None = None,
        layer: str | None = None,
        newest: int | None = None,
    ) -> list[RunEvent]:
        """Return the events with an `id` above `after`, in order; optionally of one level, rule or layer.

        Args:
            newest: largest number of events, the newest; by default all.
        """
        chosen = {"level": level, "rule": rule, "layer": layer}
        given = {key: value for key, value in chosen.items() if value is not None}
        where = "".join(f" AND {key} = ?" for key in given)
        rows = self._all(
            f"SELECT * FROM events WHERE id > ?{where} ORDER BY id DESC LIMIT ?",
            (after, *given.values(), -1 if newest is None else newest),
        )
        return [RunEvent(*row) for row in reversed(rows)]

    def event_count(self, level: str | None = None) -> int:
        """Return the number of events, optionally of one level."""
        where, values = ("", ()) if level is None else (" WHERE level = ?", (level,))
        return int(self._all(f"SELECT COUNT(*) FROM events{where}", values)[0][0])

    # Tensors

    @property
    def tensors(self) -> list[TensorRow]:
        """Row labels of a snapshot, in order."""
        rows = self._all("SELECT layer, role, operand, shape FROM tensors ORDER BY idx")
        return [TensorRow(layer, role, operand, tuple(json.loads(shape))) for layer, role, operand, shape in rows]

    def rows_of(self, layer: str) -> dict[str, int]:
        """Return the row in snapshots of each role of a layer.

        Raises:
            StoreError: unknown layer.
        """
        rows = {row.role: index for index, row in enumerate(self.tensors) if row.layer == layer}
        if not rows:
            near = did_you_mean(layer, {row.layer for row in self.tensors})
            raise StoreError(f"{self.path}: no layer '{layer}' was measured.{near}")
        return rows

    def snapshot(self, step: int | None = None) -> tuple[int, Floats]:
        """Return the step and values, float32 (tensors, statistics), of the newest snapshot at or before `step`.

        Raises:
            StoreError: there is no snapshot.
        """
        limit = _FOREVER if step is None else step
        query = "SELECT step, blob FROM telemetry WHERE step <= ? ORDER BY step DESC LIMIT 1"
        found = self._all(query, (limit,))
        if not found:
            when = "" if step is None else f" at or before step {step}"
            raise StoreError(f"{self.path}: there is no telemetry{when}.")
        return found[0][0], self._matrix(found[0][1], len(self.tensors))

    def snapshots(self, *, batch: int = 64) -> Iterator[tuple[Steps, Floats]]:
        """Yield all snapshots in batches: steps (n,), values (n, tensors, statistics).

        Tensors are those known when the first batch is read, also if a live run adds others.
        """
        rows, first = len(self.tensors), 0
        query = "SELECT step, blob FROM telemetry WHERE step >= ? ORDER BY step LIMIT ?"
        while found := self._all(query, (first, batch)):
            steps = np.array([step for step, _ in found], dtype=np.int64)
            yield steps, np.stack([self._matrix(blob, rows) for _, blob in found])
            first = int(steps[-1]) + 1

    def snapshot_steps(self) -> Steps:
        """Return the steps with a snapshot, (n,)."""
        rows = self._all("SELECT step FROM telemetry ORDER BY step")
        return np.array(rows, dtype=np.int64).reshape(-1)

    def series(
        self,
        layer: str,
        role: str,
        stat: str,
        *,
        first: int = 0,
        last: int | None = None,
        points: int | None = 1500,
    ) -> Series:
        """Return one statistic of one tensor over time.

        At most about `points` points to draw; None reads every snapshot, which takes seconds for a long run.

        Raises:
            StoreError: unknown tensor or statistic.
        """
        return self._series([self._index(layer, role)], stat, first, last, points)[0]

    def series_by_role(self, layer: str, stat: str, *, points: int | None = 1500) -> dict[str, Series]:
        """Return the `series` of each role of a layer over the whole run, in one read.

        Raises:
            StoreError: unknown layer or statistic.
        """
        rows = self.rows_of(layer)
        return dict(zip(rows, self._series([*rows.values()], stat, 0, None, points), strict=True))

    def heatmap(
        self,
        stat: str,
        role: str,
        *,
        pool: str = "max",
        first: int = 0,
        last: int | None = None,
        buckets: int = 300,
    ) -> HeatMap:
        """Return one statistic of one role for every layer with that role, in at most `buckets` buckets of steps.

        Args:
            pool: `max` or `min` over the snapshots of a bucket.

        Raises:
            StoreError: unknown statistic, role or pool.
        """
        if pool not in ("max", "min") or role not in schema.ROLES:
            raise StoreError(
                f"a heat map has a role of {', '.join(schema.ROLES)} and a pool of max or min, not '{role}', '{pool}'."
            )
        rows = [(index, row.layer) for index, row in enumerate(self.tensors) if row.role == role]
        merged = self._ranges([index for index, _ in rows], stat, first, last, buckets).pooled(buckets)
        values = merged.high if pool == "max" else merged.low
        return HeatMap(tuple(layer for _, layer in rows), merged.first, merged.last, values.T.astype(np.float32))

    def histogram(self, layer: str, role: str, step: int | None = None) -> tuple[int, int, NDArray[np.uint32]] | None:
        """Return the newest histogram of a tensor at or before `step`: (step, exponent of the first bin, counts (n,)).

        Bin i counts the elements with 2^(first + i) <= |x| / scale < 2^(first + i + 1). None if there is none.
        """
        found = self._all(
            "SELECT step, low, blob FROM histograms WHERE idx = ? AND step <= ? ORDER BY step DESC LIMIT 1",
            (self._index(layer, role), _FOREVER if step is None else step),
        )
        return (found[0][0], found[0][1], np.frombuffer(found[0][2], dtype="<u4")) if found else None

    def histograms(self) -> Iterator[tuple[int, int, int, NDArray[np.uint32]]]:
        """Yield all histograms in order of step: (step, row of the tensor, exponent of the first bin, counts (n,))."""
        for (step,) in self._all("SELECT DISTINCT step FROM histograms ORDER BY step"):
            for index, low, blob in self._all("SELECT idx, low, blob FROM histograms WHERE step = ?", (step,)):
                yield step, index, low, np.frombuffer(blob, dtype="<u4")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Internals

    def _open(self) -> sqlite3.Connection:
        if not self.path.is_file():
            raise StoreError(f"{self.path}: no run found. Name the directory of a run of `octavo train`.")
        try:
            connection = self._connect()
            if schema.is_empty(connection):
                raise StoreError(f"{self.path}: contains no run yet.")
            schema.check(connection, self.path)
            if not connection.execute("SELECT 1 FROM sessions LIMIT 1").fetchone():
                raise StoreError(f"{self.path}: contains no run yet: its writer ended before it began one.")
        except sqlite3.Error as error:
            raise unusable(self.path, error, "read") from error
        return connection

    def _connect(self) -> sqlite3.Connection:
        """Connect read-only. SQLite itself recovers what a killed writer left incomplete.

        Recovery needs write permission. Without it the run is read as is, and without a log as an immutable file.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        may_write = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        how = "mode=rw" if may_write else "mode=ro" if log.exists() else "immutable=1"
        uri = f"file:{quote(os.fsencode(self.path.resolve()))}?{how}"
        connection = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        if self._seconds is not None:
            connection.set_progress_handler(lambda: time.monotonic() > self._deadline, 20_000)
        return connection

    def _stats(self) -> tuple[str, ...]:
        with blaming(self.path, StoreError):
            found = json.loads(self._all("SELECT value FROM meta WHERE key = 'stats'")[0][0])
            if not found or not all(isinstance(name, str) for name in found):
                raise ValueError(f"statistics {shown(found)}")
            return tuple(found)

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return list(self._each(query, values))

    def _each(self, query: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield rows one by one, within the limit of time. The reader stays locked until the last one.

        Raises:
            StoreError: SQLite cannot read the file.
        """
        try:
            with self._lock:
                self._deadline = math.inf if self._seconds is None else time.monotonic() + self._seconds
                yield from self._connection.execute(query, values)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if "interrupted" in str(error):
                raise StoreError(f"{self.path}: too large to be shown: a query took {self._seconds:g} s.") from error
            raise unusable(self.path, error, "read") from error

    def _index(self, layer: str, role: str) -> int:
        keys = [(row.layer, row.role) for row in self.tensors]
        if (layer, role) not in keys:
            near = did_you_mean(f"{layer} / {role}", [" / ".join(key) for key in keys])
            raise StoreError(f"{self.path}: no telemetry of {layer} / {role}.{near}")
        return keys.index((layer, role))

    def _column(self, stat: str) -> int:
        """Return the column of a statistic.

        Raises:
            StoreError: unknown statistic.
        """
        if stat not in self.stats:
            near = did_you_mean(stat, self.stats)
            raise StoreError(f"{self.path}: unknown statistic '{stat}'.{near} Known: {', '.join(self.stats)}.")
        return self.stats.index(stat)

    def _matrix(self, blob: bytes, rows: int) -> Floats:
        """Decode a blob to its first rows, (rows, statistics); those of tensors added after it are NaN."""
        found = np.frombuffer(blob, dtype="<f4").reshape(-1, len(self.stats))[:rows]
        if len(found) == rows:
            return found
        return np.pad(found, ((0, rows - len(found)), (0, 0)), constant_values=np.nan)

    def _series(self, rows: list[int], stat: str, first: int, last: int | None, points: int | None) -> list[Series]:
        """Return one statistic of each of some tensors between two steps, in about `points` points to draw."""
        buckets = None if points is None else max(points // 2, 1)
        taken = self._ranges(rows, stat, first, last, buckets)
        return [taken.number(place).drawn(points) for place in range(len(rows))]

    def _ranges(self, rows: list[int], stat: str, first: int, last: int | None, buckets: int | None) -> Series:
        """Return one statistic of some tensors between two steps, in spans if they suffice for `buckets`."""
        column, last = self._column(stat), _FOREVER if last is None else last
        where = "step BETWEEN ? AND ?"
        (count,) = self._all(f"SELECT COUNT(*) FROM telemetry WHERE {where}", (first, last))[0]
        taken: list[tuple[tuple[int, int, int], tuple[Floats, Floats]]] = []
        if buckets is not None and count >= schema.SPAN * buckets:
            query = "SELECT first, last, count, low, high FROM telemetry_span WHERE first >= ? AND last <= ?"
            for *numbers, low, high in self._each(query, (first, last)):
                values = self._pick(low, rows, column), self._pick(high, rows, column)
                taken.append((tuple(numbers), values))
        for start, end in gaps([(span[0], span[1]) for span, _ in taken], first, last):
            for step, blob in self._each(f"SELECT step, blob FROM telemetry WHERE {where}", (start, end)):
                taken.append(((step, step, 1), (self._pick(blob, rows, column),) * 2))
        taken.sort(key=lambda each: each[0])
        spans = np.array([span for span, _ in taken], dtype=np.int64).reshape(-1, 3)
        shape = len(taken), len(rows)
        low, high = (np.array([each[end] for _, each in taken], dtype=np.float64).reshape(shape) for end in (0, 1))
        return Series(spans[:, 0], spans[:, 1], low, high, spans[:, 2].astype(np.float64))

    def _pick(self, blob: bytes, rows: list[int], column: int) -> Floats:
        picked: Floats = self._matrix(blob, max(rows, default=-1) + 1)[rows, column]
        return picked


def find_runs(root: str | Path) -> list[Path]:
    """Return the directories at or below `root` that contain a run, sorted. Links are not followed."""
    return sorted(Path(folder) for folder, _, files in os.walk(root) if schema.FILE in files)


class ConfigDifference(NamedTuple):
    """A configuration key whose values differ between runs."""

    key: str
    """Dotted key, such as `run.recipe`."""
    values: tuple[Any, ...]
    """One value per run; None without the key."""


def config_difference(runs: Sequence[RunReader]) -> list[ConfigDifference]:
    """Return the keys whose values differ, in the order of the first configuration."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    found = [ConfigDifference(key, tuple(config.get(key) for config in configs)) for key in keys]
    return [difference for difference in found if any(value != difference.values[0] for value in difference.values)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one mapping with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
