"""The tables of a run file, as data: the file is created from them, and the reference page is written from them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.errors import StoreError

FILE = "run.sqlite"
"""Name of the store in the directory of a run."""
APPLICATION_ID = 0x4F43_5456
"""`OCTV`: in the header of the file (`PRAGMA application_id`), so that no other program's file is taken for a run."""
VERSION = 1
"""Of the tables (`PRAGMA user_version`); raised when an older octavo could no longer read a file."""

ROLES = ("input", "weight", "grad_output", "grad_weight")
STATS = ("amax", "scale", "flushed", "subnormal", "saturated", "nonfinite", "mean", "variance", "kurtosis", "sqnr")
"""What a snapshot has of each tensor, FP32. `flushed`, `subnormal`, `saturated` and `nonfinite` are shares, 0 to 1;
`sqnr` is in dB and measured only where histograms are. Nothing that is about quantising is known of `grad_weight`."""
OF_CODES = ("scale", "flushed", "subnormal", "saturated", "sqnr")
"""Statistics of what is quantised only: `grad_weight` has none of them."""
DOCUMENTS = ("config", "env", "plan", "corpus", "summary")
"""Tables of JSON objects, of which the newest row holds."""
SPAN = 16
"""Snapshots that a row of `telemetry_span` sums up."""


class TensorRow(NamedTuple):
    """What a row of a snapshot is about."""

    layer: str
    """Full name of the layer."""
    role: str
    """One of `ROLES`."""
    operand: str = ""
    """How it is quantised, as in `e4m3 per-row`."""
    shape: tuple[int, ...] = ()
    """Of the tensor, where it is fixed; empty where it follows the batch."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    name: str
    about: str
    columns: tuple[tuple[str, str, str], ...]
    """Name, SQLite type, meaning."""
    key: str = ""
    """Columns of the primary key; empty where the row number is it."""
    keyed_storage: bool = False
    """Whether rows lie in the order of the key (`WITHOUT ROWID`): for small rows that are read in ranges."""

    def statement(self) -> str:
        """Return the statement that creates it."""
        columns = [f'"{name}" {kind}' for name, kind, _ in self.columns]
        key = [f"PRIMARY KEY ({self.key})"] if self.key else []
        return f"CREATE TABLE {self.name} ({', '.join([*columns, *key])}){' WITHOUT ROWID' * self.keyed_storage}"


_TIME = ("t", "REAL", "when it was written, in seconds since 1970 (UTC)")
_STEP = ("step", "INTEGER", "steps made, this one included")

TABLES = (
    Table("meta", "facts of the file itself", (
        ("key", "TEXT", "`stats`: names of the columns of a snapshot, a JSON list; `created`: seconds since 1970"),
        ("value", "TEXT", ""),
    ), "key"),
    Table("sessions", "a row for each process that wrote the run", (
        ("id", "INTEGER PRIMARY KEY", "in order"),
        ("started", "REAL", "seconds since 1970"),
        ("ended", "REAL", "the same; NULL while it runs, and for good if it was killed"),
        ("outcome", "TEXT", "`finished`, `failed` or `interrupted`; NULL as `ended`"),
        ("text", "TEXT", "why it failed"),
        ("first_step", "INTEGER", "steps that had been made before"),
        ("pid", "INTEGER", "process on the machine that wrote it"),
    )),
    Table("telemetry", "a snapshot of all tensors at a step", (
        _STEP, _TIME,
        ("rank", "INTEGER", "process that measured it, 0 where there is one"),
        ("blob", "BLOB", "little-endian FP32, a row a tensor in the order of `tensors.idx`, a column a statistic; NaN"
         " where nothing was measured"),
    ), "step, rank"),
    Table("telemetry_span", f"the least and the largest of {SPAN} snapshots on end: for drawing long runs quickly", (
        ("rank", "INTEGER", "as in `telemetry`"),
        ("first", "INTEGER", "step of its first snapshot"),
        ("last", "INTEGER", "step of its last snapshot"),
        ("count", "INTEGER", "number of snapshots"),
        ("low", "BLOB", "the least of each value, laid out as `telemetry.blob`; NaN is left out"),
        ("high", "BLOB", "the largest of each value"),
    ), "rank, first"),
    Table("tensors", "what the rows of a snapshot are", (
        ("idx", "INTEGER PRIMARY KEY", "number of the row, from 0"),
        ("layer", "TEXT", "full name of the layer"),
        ("role", "TEXT", "`input`, `weight`, `grad_output`, or `grad_weight`, the gradient that the optimizer reads"),
        ("operand", "TEXT", "how it is quantised; empty where it is not"),
        ("shape", "TEXT", "JSON list; empty where it follows the batch"),
    )),
    Table("scalars", "one number at a step", (
        _STEP,
        ("key", "TEXT", "its name, as in `metrics.jsonl`; `time` is the wall clock in seconds since 1970"),
        ("value", "REAL", "NULL for NaN"),
    ), "step, key", keyed_storage=True),
    Table("events", "what happened", (
        ("id", "INTEGER PRIMARY KEY", "in order"),
        _STEP, _TIME,
        ("level", "TEXT", "`info`, `warning` or `error`"),
        ("rule", "TEXT", "what raised it: a name in lower case"),
        ("layer", "TEXT", "layer it is about; NULL for the whole run"),
        ("role", "TEXT", "role of the tensor it is about; NULL for all"),
        ("value", "REAL", "what was measured"),
        ("limit", "REAL", "what it was held against"),
        ("action", "TEXT", "what was done about it; NULL for nothing"),
        ("text", "TEXT", "for people"),
    )),
    Table("histograms", "how many elements of a sample of a tensor lie in each binade of the format", (
        _STEP,
        ("idx", "INTEGER", "the tensor, as in `tensors`"),
        ("low", "INTEGER", "exponent of the first bin: bin i counts 2^(low+i) <= magnitude / scale < 2^(low+i+1), each"
         " element over the scale of its own tile; neither zeros nor what is not finite"),
        ("blob", "BLOB", "little-endian uint32, one a bin"),
    ), "step, idx"),
    Table("system", "the machine, every few seconds", (
        _TIME,
        ("json", "TEXT", "an object of numbers; what cannot be measured is left out"),
    )),
    *(Table(name, about, (
        ("step", "INTEGER", "steps that had been made"), _TIME, ("json", "TEXT", "an object; the newest row holds"),
    )) for name, about in zip(DOCUMENTS, (
        "the configuration", "versions, device and what else decides the numbers", "the conversion plan",
        "statistics of the text", "what came out, at the end",
    ), strict=True)),
)  # fmt: skip
INDICES = ("CREATE INDEX system_by_time ON system (t)",)
CUT = {
    "telemetry": "step",
    "telemetry_span": "last",
    "scalars": "step",
    "events": "step",
    "histograms": "step",
    "summary": "step",
}
"""Tables that lose what lies past the checkpoint that a run is resumed from, and the column that says so."""


def create(connection: sqlite3.Connection, stats: tuple[str, ...], now: float) -> None:
    """Make the tables in an empty file, all at once or not at all."""
    import json

    connection.execute("BEGIN IMMEDIATE")
    for statement in (*(table.statement() for table in TABLES), *INDICES):
        connection.execute(statement)
    connection.executemany(
        "INSERT INTO meta VALUES (?, ?)", [("stats", json.dumps(list(stats))), ("created", repr(now))]
    )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether the file holds nothing yet: new, or of a process killed before it made the tables."""
    return not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()


def check(connection: sqlite3.Connection, path: Path) -> None:
    """See to it that a file is a run of a version that can be read.

    Raises:
        StoreError: another program's file, or a newer octavo's.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: is a SQLite file of another program, not a run of octavo. Name another file.")
    if version > VERSION:
        raise StoreError(
            f"{path}: was written by a newer octavo (run store version {version}; this one reads up to {VERSION})."
            " Update octavo to open it."
        )
