"""Kinds of measurement: from cases to rows, result files and tables; and the flags of every command.

A kind is a file with its `Kind`, a function that yields rows, and a command that ends in `output.finish(KIND, rows)`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.errors import ConfigError, did_you_mean
from octavo_bench import results
from octavo_bench.ranks import under_torchrun
from octavo_bench.render import Column, Table, cell, figures, has_failed
from octavo_bench.results import Result, Row, Schema

Names = Annotated[tuple[str, ...], Parameter(negative=())]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind(Schema):
    """A kind of measurement and the presentation of its rows. Its tables have its name and those of `tables`."""

    columns: Sequence[Column] = ()
    """Columns of its table and of the progress line of a row; without any, no line is printed."""
    names: int = 1
    """Number of leading columns that name a row."""
    told: Sequence[Column] = ()
    """Further columns of the progress line."""
    derived: Callable[[Row], Row] = lambda row: {}
    """(row) -> further values for the columns; not called for a failed row."""
    show: Callable[[Sequence[Row]], str] | None = None
    """(rows) -> Markdown, in place of one table of the columns."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Further tables by name; one of its own name replaces the table of the columns."""
    measured_by: str = ""
    """The command, if not `octavo bench NAME`."""

    def markdown(self, rows: Sequence[Row]) -> str:
        """Return the table of rows."""
        return self.show(rows) if self.show else figures(self.columns, self.with_derived(rows), self.names)

    def with_derived(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows with the further values for the columns."""
        return [row if has_failed(row) else row | self.derived(row) for row in rows]

    def table(self, directory: Path) -> str:
        """Return the table of the results under a directory, each with its origin; empty if there are none."""
        return _with_origins(self.markdown, results.newest(self.name, directory))

    def line(self, row: Row) -> str:
        """Return a row as a line of progress: its name, its figures, and the error if it failed."""
        (row,) = self.with_derived([row])
        cells = [(title, cell(form, row)) for title, form in (*self.columns, *self.told)]
        name = "  ".join(text for _, text in cells[: self.names] if text)
        figures = [f"{title} {text}" for title, text in cells[self.names :] if text]
        failed = [f"failed: {row['error']}"] if has_failed(row) else []
        return ": ".join(filter(None, (name, ", ".join((*figures, *failed)))))

    def case(self, row: Row) -> results.Key:
        """Return the cells that name a row, or its keys if there are no columns."""
        return tuple(cell(form, row) for _, form in self.columns[: self.names]) or Schema.case(self, row)


def by_result(name: str, show: Callable[[Sequence[Row]], str]) -> Table:
    """Return a further table of the newest results of a kind; empty if `show` is."""
    return lambda directory: _with_origins(show, results.newest(name, directory))


def _with_origins(show: Callable[[Sequence[Row]], str], found: Sequence[Result]) -> str:
    parts = ((show(result.rows), result.origin) for result in found)
    return "\n\n".join(f"{text}\n\n{origin}" for text, origin in parts if text)


def kinds() -> dict[str, Kind]:
    """Return every kind by name, in the order of the commands, whose files define them."""
    return {name: kind for name, kind in results.schemas().items() if isinstance(kind, Kind)}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Flags for the rows of a measurement."""

    write: Annotated[Path | None, Parameter(negative=())] = None
    """Directory of result files, benchmarks/results in this repository. The day's rows of other workloads are kept."""
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False
    """Print the rows as JSON on stdout, the progress on stderr."""

    def say(self, line: str) -> None:
        """Print a line of progress, to stderr if stdout is for JSON."""
        print(line, file=sys.stderr if self.json_output else sys.stdout, flush=True)

    def keep(
        self,
        kind: Kind,
        rows: Iterable[Row],
        *words: str,
        device: str = "auto",
        machine: str | None = None,
        **flags: Any,
    ) -> list[Row]:
        """Print and write rows, and return them. Without rows, as on ranks other than the first, print nothing.

        Each row is printed when measured, and kept in a folder `unfinished-*` until all are, as the next may end the
        process.

        Args:
            rows: a row may be yielded again after a change.
            words: arguments of the command that repeats the measurement.
            flags: flags of that command, see `command_line`.
            device: measured device; not a flag of the command.
            machine: a name in place of the device's.
        """
        command = command_line(kind.measured_by or f"octavo bench {kind.name}", *words, **flags)
        measured: dict[int, Row] = {}

        def write(directory: Path) -> Path:
            made = results.made_today(kind.name, [*measured.values()], command, device=device, machine=machine)
            return results.write(made, directory)

        drafts = self.write and self.write / f"unfinished-{os.getpid()}"
        for row in rows:
            if kind.columns:
                self.say(kind.line(row))
            measured[id(row)] = row
            if drafts:
                write(drafts)
        if self.json_output and measured:
            print(json.dumps([*measured.values()], indent=1))
        if self.write and drafts and measured:
            path = write(self.write)
            shutil.rmtree(drafts)
            print(f"written: {path}", file=sys.stderr)
            if hidden := results.partial(path):
                print(f"tables still show {', '.join(hidden)}, which has more cases of this session", file=sys.stderr)
        return [*measured.values()]

    def finish(self, kind: Kind, rows: Iterable[Row], *words: str, device: str = "auto", **flags: Any) -> int:
        """As `keep`, and return the exit code: 1 if a row failed."""
        return int(any(has_failed(row) for row in self.keep(kind, rows, *words, device=device, **flags)))


TO_STDOUT = Output()


def command_line(*words: str, **flags: Any) -> str:
    """Return the command that repeats the measurement; on ranks of torchrun, with torchrun.

    Args:
        flags: by name; left out if None, False or empty, repeated if a tuple.
    """
    if under_torchrun():
        words = ("torchrun --nproc-per-node", os.environ["WORLD_SIZE"], "-m", *words)
    for name, value in flags.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is None or one is False or one == "":
                continue
            shown = "" if one is True else f' "{one}"' if " " in str(one) else f" {one}"
            words = (*words, f"--{name.replace('_', '-')}{shown}")
    return " ".join(words)


def device_named(name: str) -> str:
    """Return the device type that `--device` selects."""
    from octavo.lab.train.device import resolve

    return resolve(name).type


def known(flag: str, name: str, names: Iterable[str], noun: str) -> str:
    """Return `name` if it is one of `names`.

    Raises:
        ConfigError: it is not.
    """
    if name not in (names := [*names]):
        near = did_you_mean(name, names)
        raise ConfigError(f"{flag}: there is no {noun} '{name}'.{near} Known are: {', '.join(names)}.")
    return name


def positive(flag: str, number: int) -> int:
    """Return the number of a flag.

    Raises:
        ConfigError: it is not positive.
    """
    if number < 1:
        raise ConfigError(f"{flag}: {number} is not a positive number.")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers of a text such as `0,1`."""
    return tuple(map(int, text.split(",")))
