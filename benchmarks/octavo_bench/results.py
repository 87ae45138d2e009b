"""Result files: measurements with machine, software and command. All figures in README and docs come from one.

A result is `benchmarks/results/<date>-<hardware>-<kind>.json`. Rows of a file with equal session keys of their kind are
a session; ratios to BF16 are within a session. Tables show the newest session that is not partial: a session is partial
if an earlier one has its cases and more.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo._util.files import write_text
from octavo.errors import ConfigError, RunError, did_you_mean
from octavo_bench import cli

Row = dict[str, Any]
"""One row of a result."""
PAPER = "paper"
"""Hardware of computed results."""
Key = tuple[Any, ...]
"""Values of the keys of a session or of a case."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schema:
    """Schema of the rows of a kind of measurement."""

    name: str
    """Name of the kind in result files."""
    keys: Mapping[str, type]
    """Required keys of a row. Others are kept, and read by columns that show them."""
    may_fail: bool = True
    """Rows may have `error`, a text, in place of their figures: a failure is a result."""
    session: tuple[str, ...] = ("workload", "model", "tokens")
    """Keys whose values the rows of a session share; `hardware` is that of the file."""

    def case(self, row: Row) -> Key:
        """Return the values that identify a row within its session."""
        return tuple(row.get(key) for key, kind in self.keys.items() if kind is not float)

    def session_of(self, row: Row, result: Result) -> Key:
        """Return the values that a row of a result shares with the rest of its session."""
        values = {"hardware": result.hardware} | row
        return tuple(values.get(key) for key in self.session)

    def sessions(self, result: Result) -> dict[Key, list[Row]]:
        """Return the rows of a result by session."""
        found: dict[Key, list[Row]] = {}
        for row in result.rows:
            found.setdefault(self.session_of(row, result), []).append(row)
        return found

    def missing(self, newer: Iterable[Row], older: Iterable[Row]) -> list[Key]:
        """Return the cases missing in a partial session: those of an older one that has all of the newer and more."""
        cases = {self.case(row) for row in newer}
        before = [*dict.fromkeys(map(self.case, older))]
        return [case for case in before if case not in cases] if cases <= {*before} else []

    def check(self, row: Row, where: str) -> None:
        """Raise `ConfigError` if a row lacks a key, or has a figure of another type or one that is not finite."""
        required = self.keys
        if self.may_fail and "error" in row:
            required = {"error": str, **{key: kind for key, kind in self.keys.items() if kind is str}}
        for key, kind in required.items():
            if key not in row:
                raise ConfigError(f"{where}: the key '{key}' is missing.{did_you_mean(key, row)}")
            value, accepted = row[key], int | float if kind is float else kind
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"{where}: '{key}' must be {kind.__name__}, got {value!r}.")
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{where}: '{key}' is {value}. A figure must be finite.")


@cache
def schemas() -> dict[str, Schema]:
    """Return the schema of every kind by name, in the order of the commands, then the closed ones."""
    files = dict.fromkeys(place.partition(":")[0] for place in cli.COMMANDS.values())
    found = [value for name in files for value in vars(import_module(f"octavo_bench.{name}")).values()]
    found += import_module("octavo_bench.closed").STUDIES
    return {schema.name: schema for schema in found if isinstance(schema, Schema)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One measurement session. Invalid content raises `ConfigError` on construction."""

    kind: str
    """Name of a `Kind`."""
    date: str
    """Day of the measurement, as YYYY-MM-DD."""
    hardware: str
    """A slug, as returned by `hardware()`: `nvidia-h200`."""
    versions: dict[str, str]
    """Software by name, as returned by `versions()`."""
    command: str
    """Command that repeats the measurement."""
    rows: tuple[dict[str, Any], ...]
    """One row per measured case, with the keys of its kind and any others."""

    def __post_init__(self) -> None:
        schema = _schema(self.kind)
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date):
            raise ConfigError(f"result: the date '{self.date}' is not written YYYY-MM-DD.")
        if self.hardware != slug(self.hardware):
            raise ConfigError(f"result: hardware '{self.hardware}' is no slug; '{slug(self.hardware)}' is.")
        if not self.rows:
            raise ConfigError("result: there are no rows. A result without a measurement is not written.")
        for index, row in enumerate(self.rows):
            schema.check(row, f"result of kind '{self.kind}': rows[{index}]")

    @property
    def file_name(self) -> str:
        """Name of its file: `<date>-<hardware>-<kind>.json`."""
        return f"{self.date}-{self.hardware}-{self.kind}.json"

    @property
    def origin(self) -> str:
        """Origin of its figures: machine, software, file and command; several commands in a fold."""
        if self.hardware == PAPER:
            how = f"Computed, not measured, with `{self.command}` from measured rates and stated links"
            return f"{how}: `{self.file_name}`."
        software = ", ".join(f"{key} {value}" for key, value in self.versions.items())
        commands = self.command.split("; ")
        if len(commands) == 1:
            return f"Measured on {self.hardware} ({software}) with `{self.command}`: `{self.file_name}`."
        measured = f"Measured on {self.hardware} ({software}): `{self.file_name}`."
        fold = ["<details>", "<summary>Commands</summary>", "", "```text", *commands, "```", "", "</details>"]
        return "\n".join([measured, "", *fold])


def _schema(name: str) -> Schema:
    known = schemas()
    if name not in known:
        raise ConfigError(f"result: unknown kind '{name}'.{did_you_mean(name, known)} Known kinds: {', '.join(known)}.")
    return known[name]


def failure(error: Exception) -> str:
    """Return the text of an exception for `error`: its class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"


def write(result: Result, directory: Path) -> Path:
    """Write `result` under `directory` and return its path.

    A file of the same name keeps its other sessions (see `merge`). The file appears whole or not at all.

    Raises:
        ConfigError: the file of that name exists, and is not a result or cannot be merged.
        RunError: it could not be written.
    """
    path = directory / result.file_name
    if path.exists():
        result = merge(load(path), result)
    text = json.dumps(config_reader.to_dict(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, RunError, mkdir=True)
    return path


def made_today(
    kind: str, rows: Sequence[Row], command: str, *, device: str = "auto", machine: str | None = None
) -> Result:
    """Return today's rows with this machine and software.

    Args:
        device: measured device, as `octavo.lab.train.device` resolves it.
        machine: a name in place of the device's.
    """
    machine = machine or hardware(device)
    return Result(kind=kind, date=today(), hardware=machine, versions=versions(), command=command, rows=tuple(rows))


def merge(older: Result, newer: Result) -> Result:
    """Return `newer` with the sessions of `older` that `newer` does not measure: one file per day.

    Rows of two sessions with the same keys are never mixed, as they compare only within a session.

    Raises:
        ConfigError: kind, day, machine or software differ, so that one file cannot hold both; or a partial session
            would replace one with more cases.
    """
    for field in ("kind", "date", "hardware", "versions"):
        was, now = getattr(older, field), getattr(newer, field)
        if was != now:
            raise ConfigError(f"result: {field} was {was!r} and is {now!r}: these cannot be one file.")
    schema = _schema(newer.kind)
    before, measured = schema.sessions(older), schema.sessions(newer)
    for key in before.keys() & measured.keys():
        if missing := schema.missing(measured[key], before[key]):
            raise ConfigError(
                f"result: of this session, {newer.file_name} has {len(missing)} rows more, which would be lost: "
                f"{'; '.join(' '.join(map(str, case)) for case in missing)}. Measure all, or write elsewhere."
            )
    kept = tuple(row for row in older.rows if schema.session_of(row, older) not in measured)
    if not kept:
        return newer
    command = "; ".join(dict.fromkeys(f"{older.command}; {newer.command}".split("; ")))
    return dataclasses.replace(newer, rows=(*kept, *newer.rows), command=command)


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        ConfigError: the file is missing, malformed, has an unknown key or a row that lacks one.
    """
    return _read(path, path.read_bytes() if path.is_file() else b"")


@lru_cache(maxsize=256)  # the tables of all pages read each file a dozen times, and its check takes longest
def _read(path: Path, _content: bytes) -> Result:
    try:
        return config_reader.read(Result, config_reader.read_file(path), str(path))
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error


def every(kind: str, directory: Path) -> list[Result]:
    """Return all results of `kind` under `directory`, the newest first."""
    found = (load(path) for path in directory.glob(f"*-{kind}.json"))
    own = (result for result in found if result.kind == kind)
    return sorted(own, key=lambda result: (result.date, result.hardware), reverse=True)


def latest(kind: str, directory: Path) -> Result | None:
    """Return the newest result of `kind` under `directory`, or None if it was never measured."""
    return next(iter(every(kind, directory)), None)


def newest(kind: str, directory: Path) -> list[Result]:
    """Return the newest session with the same keys that is not partial, as results with these rows, the newest first.

    A session is partial if an earlier one has its cases and more.
    """
    schema, found = _schema(kind), every(kind, directory)
    shown: dict[Key, list[Row]] = {}
    for result in reversed(found):
        for key, rows in schema.sessions(result).items():
            if key not in shown or not schema.missing(rows, shown[key]):
                shown[key] = rows
    whole = {id(row) for rows in shown.values() for row in rows}
    parts = ((result, tuple(row for row in result.rows if id(row) in whole)) for result in found)
    return [dataclasses.replace(result, rows=rows) for result, rows in parts if rows]


def partial(path: Path) -> list[str]:
    """Return the files that tables show in place of rows of this file: those with more cases of the same sessions."""
    own = load(path)
    sessions = _schema(own.kind).sessions
    shown = newest(own.kind, path.parent)
    earlier = [result for result in shown if (result.date, result.hardware) < (own.date, own.hardware)]
    return [result.file_name for result in earlier if sessions(result).keys() & sessions(own).keys()]


def on_one_machine(kind: str, directory: Path) -> list[Result]:
    """Return the results of `kind` on the machine of the newest, the newest first."""
    found = every(kind, directory)
    return [result for result in found if result.hardware == found[0].hardware]


def today() -> str:
    """Return today's date, UTC, in the format of results."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def versions() -> dict[str, str]:
    """Return the versions that figures depend on: python, torch, octavo; cuda and triton if they exist."""
    from octavo.lab.monitor import system

    return {name: version for name, version in system.versions().items() if version is not None}


@cache
def package_digest() -> str:
    """Return 12 hexadecimal digits of SHA-256 over the package's Python files, by path: which code made a row.

    A copy without version control has it too, and so has a tree with changes that no commit holds.
    """
    import octavo

    root, digest = Path(octavo.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def hardware(device_name: str = "auto") -> str:
    """Return a slug of the hardware: the name of the GPU, or of the processor; by default the first GPU if any."""
    import torch

    from octavo.lab.train import device

    name = device.describe(device.resolve(device_name))
    return slug(name.removesuffix(f", {torch.get_num_threads()} threads")) or "unknown"


def slug(name: str) -> str:
    """Return `name` in lower case, words joined by dashes: `NVIDIA H200` is `nvidia-h200`."""
    bare = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-.")
