"""The tables of a run file as data, from which the file and the reference page are generated."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.errors import StoreError

FILE = "run.sqlite"
"""File name of the store in a run's directory."""
APPLICATION_ID = 0x4F43_5456
"""`OCTV`: in the header of the file (`PRAGMA application_id`), identifies the file as a run."""
VERSION = 1
"""Version of the tables (`PRAGMA user_version`), raised when older versions of Octavo cannot read a file."""

ROLES = ("input", "weight", "grad_output", "grad_weight")
STATS = ("amax", "scale", "flushed", "subnormal", "saturated", "nonfinite", "mean", "variance", "kurtosis", "sqnr")
"""Statistics per tensor of a snapshot, FP32. `flushed`, `subnormal`, `saturated` and `nonfinite` are shares, 0 to 1;
`sqnr` is in dB and measured in steps with histograms. `grad_weight` is not quantised and has no such statistics."""
OF_CODES = ("scale", "flushed", "subnormal", "saturated", "sqnr")
"""Statistics of quantised tensors only, not of `grad_weight`."""
DOCUMENTS = ("config", "env", "plan", "corpus", "summary")
"""Tables of JSON objects; the newest row is current."""
SPAN = 16
"""Snapshots per row of `telemetry_span`."""


class TensorRow(NamedTuple):
    """Label of a row of a snapshot."""

    layer: str
    """Full name of the layer."""
    role: str
    """One of `ROLES`."""
    operand: str = ""
    """Quantisation, such as `e4m3 per-row`."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor; empty if it depends on the batch."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    name: str
    about: str
    columns: tuple[tuple[str, str, str], ...]
    """Name, SQLite type, meaning."""
    key: str = ""
    """Columns of the primary key; empty for the row id."""
    keyed_storage: bool = False
    """True to store rows in key order (`WITHOUT ROWID`), for small rows read in ranges."""

    def statement(self) -> str:
        """Return the statement that creates the table."""
        columns = [f'"{name}" {kind}' for name, kind, _ in self.columns]
        key = [f"PRIMARY KEY ({self.key})"] if self.key else []
        return f"CREATE TABLE {self.name} ({', '.join([*columns, *key])}){' WITHOUT ROWID' * self.keyed_storage}"


_TIME = ("t", "REAL", "time of writing, in seconds since 1970 (UTC)")
_STEP = ("step", "INTEGER", "steps completed, including this one")

TABLES = (
    Table("meta", "metadata of the file", (
        ("key", "TEXT", "`stats`: column names of a snapshot, a JSON list; `created`: seconds since 1970"),
        ("value", "TEXT", ""),
    ), "key"),
    Table("sessions", "one row per process that wrote the run", (
        ("id", "INTEGER PRIMARY KEY", "in order"),
        ("started", "REAL", "seconds since 1970"),
        ("ended", "REAL", "seconds since 1970; NULL while it runs or if it was killed"),
        ("outcome", "TEXT", "`finished`, `failed` or `interrupted`; NULL if `ended` is NULL"),
        ("text", "TEXT", "reason of a failure"),
        ("first_step", "INTEGER", "steps completed before the session"),
        ("pid", "INTEGER", "process id"),
    )),
    Table("telemetry", "one snapshot of all tensors per step", (
        _STEP, _TIME,
        ("rank", "INTEGER", "0: values are those of all ranks"),
        ("blob", "BLOB", "little-endian FP32, one row per tensor in the order of `tensors.idx`, one column per"
         " statistic; NaN without a measurement"),
    ), "step, rank"),
    Table("telemetry_span", f"minimum and maximum of {SPAN} consecutive snapshots, for drawing long runs quickly", (
        ("rank", "INTEGER", "as in `telemetry`"),
        ("first", "INTEGER", "step of its first snapshot"),
        ("last", "INTEGER", "step of its last snapshot"),
        ("count", "INTEGER", "number of snapshots"),
        ("low", "BLOB", "minimum of each value, laid out as `telemetry.blob`; ignores NaN"),
        ("high", "BLOB", "maximum of each value"),
    ), "rank, first"),
    Table("tensors", "row labels of a snapshot", (
        ("idx", "INTEGER PRIMARY KEY", "index of the row, from 0"),
        ("layer", "TEXT", "full name of the layer"),
        ("role", "TEXT", "`input`, `weight`, `grad_output`, or `grad_weight`, the gradient read by the optimizer"),
        ("operand", "TEXT", "quantisation; empty if not quantised"),
        ("shape", "TEXT", "JSON list; empty if it depends on the batch"),
    )),
    Table("scalars", "one number per step", (
        _STEP,
        ("key", "TEXT", "name, as in `metrics.jsonl`; `time` is the wall clock in seconds since 1970"),
        ("value", "REAL", "NULL for NaN"),
    ), "step, key", keyed_storage=True),
    Table("events", "recorded events", (
        ("id", "INTEGER PRIMARY KEY", "in order"),
        _STEP, _TIME,
        ("level", "TEXT", "`info`, `warning` or `error`"),
        ("rule", "TEXT", "rule that raised it, in lower case"),
        ("layer", "TEXT", "layer concerned; NULL for the whole run"),
        ("role", "TEXT", "role of the tensor concerned; NULL for all"),
        ("value", "REAL", "measured value"),
        ("limit", "REAL", "limit of the value"),
        ("action", "TEXT", "action taken; NULL for none"),
        ("text", "TEXT", "message"),
    )),
    Table("histograms", "number of sampled elements of a tensor per binade", (
        _STEP,
        ("idx", "INTEGER", "tensor, as in `tensors`"),
        ("low", "INTEGER", "exponent of the first bin: bin i counts 2^(low+i) <= magnitude / scale < 2^(low+i+1), with"
         " the scale of the element's tile; zeros and non-finite values are not counted"),
        ("blob", "BLOB", "little-endian uint32, one per bin"),
    ), "step, idx"),
    Table("system", "readings of the machine, every few seconds", (
        _TIME,
        ("json", "TEXT", "an object of numbers; unavailable readings are left out"),
    )),
    *(Table(name, about, (
        ("step", "INTEGER", "steps completed"), _TIME, ("json", "TEXT", "an object; the newest row is current"),
    )) for name, about in zip(DOCUMENTS, (
        "the configuration", "versions, device and settings that affect the results", "the conversion plan",
        "statistics of the text", "the results, at the end",
    ), strict=True)),
)  # fmt: skip


def columns(table: str) -> set[str]:
    """Return the names of a table's columns."""
    return {name for each in TABLES if each.name == table for name, _, _ in each.columns}


INDICES = ("CREATE INDEX system_by_time ON system (t)",)
CUT = {
    "telemetry": "step",
    "telemetry_span": "last",
    "scalars": "step",
    "events": "step",
    "histograms": "step",
    "summary": "step",
}
"""Tables that lose their rows past the checkpoint that a run resumes from, with the column to compare."""


def create(connection: sqlite3.Connection, now: float) -> None:
    """Create the tables in an empty file, atomically."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in (*(table.statement() for table in TABLES), *INDICES):
        connection.execute(statement)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [("stats", json.dumps(STATS)), ("created", repr(now))])
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Return True if the file has no tables: new, or of a process killed before creating them."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a file is a run of a readable version, with its tables and nothing else.

    Raises:
        StoreError: the file is from another program or a newer Octavo, or damaged.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: a SQLite file of another program, not a run of Octavo. Name another file.")
    if version > VERSION:
        raise StoreError(
            f"{path}: written by a newer Octavo (run store version {version}; this one reads up to {VERSION})."
            " Update octavo to open it."
        )
    kinds = dict(connection.execute("SELECT name, type FROM sqlite_master WHERE type != 'index'").fetchall())
    for table in TABLES:
        found = {row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")}
        if kinds.get(table.name) != "table" or found != columns(table.name):
            raise StoreError(f"{path}: damaged: it has no table '{table.name}', or one of other columns.")
    if strange := sorted(kinds.keys() - {table.name for table in TABLES} - {"sqlite_sequence", "sqlite_stat1"}):
        raise StoreError(f"{path}: has the {kinds[strange[0]]} '{strange[0]}', which Octavo did not make.")
