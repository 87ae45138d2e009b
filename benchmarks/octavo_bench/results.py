"""Result files: measurements with machine, software and command. All figures in README and docs come from one.

A result is `benchmarks/results/<date>-<hardware>-<kind>.json`, the newest of a kind `latest/<kind>.json` too.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo._util import config_reader
from octavo._util.files import write_text
from octavo.errors import ConfigError, RunError, did_you_mean

if TYPE_CHECKING:
    from octavo_bench.kind import Kind

Row = dict[str, Any]
"""One row of a result."""
PAPER = "paper"
"""The hardware of results that are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One measurement session. Invalid content raises `ConfigError` on construction."""

    kind: str
    """Name of a `Kind`."""
    date: str
    """The day it was measured, as YYYY-MM-DD."""
    hardware: str
    """A slug, as `hardware()` gives it: `nvidia-h200`."""
    versions: dict[str, str]
    """Software by name, as `versions()` gives it."""
    command: str
    """The command that measures it again."""
    rows: tuple[dict[str, Any], ...]
    """One row per measured case, with the keys of its kind and any others."""

    def __post_init__(self) -> None:
        kind = _kind(self.kind)
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date):
            raise ConfigError(f"result: the date '{self.date}' is not written YYYY-MM-DD.")
        if self.hardware != slug(self.hardware):
            raise ConfigError(f"result: hardware '{self.hardware}' is no slug; '{slug(self.hardware)}' is.")
        if not self.rows:
            raise ConfigError("result: there are no rows. A result without a measurement is not written.")
        for index, row in enumerate(self.rows):
            kind.check(row, f"result of kind '{self.kind}': rows[{index}]")

    @property
    def file_name(self) -> str:
        """The name of its file: `<date>-<hardware>-<kind>.json`."""
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


def _kind(name: str) -> Kind:
    from octavo_bench.kind import kinds  # which imports this file

    known = kinds()
    if name not in known:
        raise ConfigError(f"result: unknown kind '{name}'.{did_you_mean(name, known)} Known kinds: {', '.join(known)}.")
    return known[name]


def failure(error: Exception) -> str:
    """Return the text of an exception for `error`: its class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or 'no message'}"


def write(result: Result, directory: Path) -> Path:
    """Write `result` under `directory` and return its path.

    One of the same name is replaced, but for its rows of other workloads or models: those stay, if the software is the
    same. `latest/<kind>.json` follows unless it holds a later day. Each file appears whole or not at all.

    Raises:
        ConfigError: the file of that name, or `latest/<kind>.json`, exists and is not a result.
        RunError: it could not be written.
    """
    before = load(directory / result.file_name) if (directory / result.file_name).exists() else None
    if before is not None and before.versions == result.versions:
        result = merge(before, result)
    text = json.dumps(config_reader.to_dict(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    path = directory / result.file_name
    latest = directory / "latest" / f"{result.kind}.json"
    superseded = latest.exists() and load(latest).date > result.date
    for target in [path] if superseded else [path, latest]:
        write_text(target, text, RunError, mkdir=True)
    return path


def made_today(
    kind: str, rows: Sequence[Row], command: str, *, device: str = "auto", machine: str | None = None
) -> Result:
    """Return today's rows with this machine and software.

    Args:
        device: measured device, as `octavo.train.device` resolves it.
        machine: a name in place of the device's.
    """
    machine = machine or hardware(device)
    return Result(kind=kind, date=today(), hardware=machine, versions=versions(), command=command, rows=tuple(rows))


def merge(older: Result, newer: Result) -> Result:
    """Return `newer` with the rows of `older` that `newer` does not measure: one file per day.

    Rows of one workload, or of one model and length of training, are never mixed: they compare only within a session.

    Raises:
        ConfigError: they are of another kind, day, machine or software, so that one file cannot stand for both.
    """
    for field in ("kind", "date", "hardware", "versions"):
        before, now = getattr(older, field), getattr(newer, field)
        if before != now:
            raise ConfigError(f"result: {field} was {before!r} and is {now!r}: these cannot be one file.")
    keys = _kind(newer.kind).session
    measured = {tuple(row.get(key) for key in keys) for row in newer.rows}
    kept = tuple(row for row in older.rows if tuple(row.get(key) for key in keys) not in measured)
    if not kept:
        return newer
    command = "; ".join(dict.fromkeys(f"{older.command}; {newer.command}".split("; ")))
    return dataclasses.replace(newer, rows=(*kept, *newer.rows), command=command)


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        ConfigError: the file is missing, malformed, has an unknown key or a row that lacks one.
    """
    try:
        return config_reader.read(Result, config_reader.read_file(path), str(path))
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error


def latest(kind: str, directory: Path) -> Result | None:
    """Return the newest result of `kind` under `directory`, or None where it was never measured."""
    path = directory / "latest" / f"{kind}.json"
    return load(path) if path.exists() else None


def history(kind: str, directory: Path) -> list[Result]:
    """Return the results of `kind` on the machine of the newest, the newest first."""
    found = latest(kind, directory)
    if found is None:
        return []
    older = (load(path) for path in directory.glob(f"*-{found.hardware}-{kind}.json") if path.name != found.file_name)
    return [found, *sorted(older, key=lambda result: result.date, reverse=True)]


def newest(kind: str, directory: Path) -> list[Result]:
    """Return the newest rows of each session, as the keys of the kind define it, in their results, newest first."""
    keys = _kind(kind).session
    found: list[Result] = []
    known: set[tuple[Any, ...]] = set()
    for result in history(kind, directory):
        named = [(tuple(row.get(key) for key in keys), row) for row in result.rows]
        if rows := tuple(row for session, row in named if session not in known):
            found.append(dataclasses.replace(result, rows=rows))
            known |= {session for session, _ in named}
    return found


def current(kind: str, directory: Path) -> list[Result]:
    """Return the newest result of `kind`, if there is any."""
    found = latest(kind, directory)
    return [found] if found else []


def latest_by_hardware(kind: str, directory: Path) -> list[Result]:
    """Return the newest result of `kind` of each machine under `directory`, the newest first."""
    found = sorted((load(path) for path in directory.glob(f"*-{kind}.json")), key=lambda result: result.date)
    newest = {result.hardware: result for result in found if result.kind == kind}
    return sorted(newest.values(), key=lambda result: (result.date, result.hardware), reverse=True)


def today() -> str:
    """Return today's date, UTC, as results write it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def versions() -> dict[str, str]:
    """Return the versions a figure depends on: python, torch, octavo; cuda and triton where they exist."""
    from octavo.monitor import system

    return {name: version for name, version in system.versions().items() if version is not None}


def hardware(device_name: str = "auto") -> str:
    """Return a slug of the hardware: the name of the GPU, or of the processor; by default the first GPU if any."""
    import torch

    from octavo.train import device

    name = device.describe(device.resolve(device_name))
    return slug(name.removesuffix(f", {torch.get_num_threads()} threads")) or "unknown"


def slug(name: str) -> str:
    """Return `name` in lower case, words joined by dashes: `NVIDIA H200` is `nvidia-h200`."""
    bare = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", bare).strip("-.")
