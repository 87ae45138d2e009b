"""`octavo bench KIND`: the commands by name, and the flags and progress lines that they share.

Each kind of measurement is a file with its command. A file is imported when its command is called.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from octavo.cli.lazy import add_commands
from octavo.errors import ConfigError, did_you_mean
from octavo_bench.results import Row

Names = Annotated[tuple[str, ...], Parameter(negative=())]

COMMANDS = {
    "demo": "demo:command",
    "step": "step:command",
    "host": "host:command",
    "hf": "hf:command",
    "clients": "clients:command",
    "pilot": "pilot:command",
    "gemm": "gemm:command",
    "kernels": "kernels:command",
    "telemetry": "telemetry:command",
    "parity": "parity:parity",
    "compare": "study:compare",
    "tiers": "study:tiers",
    "data-parallel": "study:data_parallel",
    "finetune": "finetune:command",
    "stress": "stress:command",
    "portability": "portability:command",
    "localize": "localize:command",
    "faults": "faults:command",
    "robustness": "robustness:command",
    "phases": "phases:command",
    "moe": "moe:command",
    "optimizer": "optimizer:command",
    "memory": "memory:command",
    "reduce": "reduce:command",
    "distributed": "distributed:command",
    "rank": "distributed:rank",
    "scaling": "scaling:command",
    "tables": "tables:command",
    "pictures": "pictures:command",
}
"""File and function by name."""

bench = App(name="bench")
add_commands(bench, "octavo_bench", COMMANDS)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Flags for the rows of a measurement."""

    write: Annotated[Path | None, Parameter(negative=())] = None
    """Directory of result files, benchmarks/results in this repository. The day's rows of other workloads stay."""
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False
    """Print the rows as JSON on stdout, the progress on stderr."""

    def say(self, line: str) -> None:
        """Print a line of progress, to stderr if stdout is for JSON."""
        print(line, file=sys.stderr if self.json_output else sys.stdout, flush=True)

    def lines(self, name: Callable[[Row], str], figures: Callable[[Row], str]) -> Callable[[Row], None]:
        """Return a function that prints a line for a row: its name, then its figures or the error."""

        def line(row: Row) -> None:
            self.say(f"{name(row)} " + (f"failed: {row['error']}" if "error" in row else figures(row)))

        return line

    def keep(
        self,
        kind: str,
        rows: Iterable[Row],
        command: str,
        show: Callable[[Row], object] = lambda row: None,
        *,
        device: str = "auto",
        machine: str | None = None,
    ) -> list[Row]:
        """Show, print and write rows, and return them. Of no rows, as other ranks than the first have, nothing is said.

        Each row is shown as it comes, and kept in a folder `unfinished-*` until all are measured, as the next may end
        the process.

        Args:
            rows: a row that comes again has changed.
            command: measures the rows again.
            show: prints a line of progress.
            machine: a name in place of the device's.
        """
        from octavo_bench import results

        measured: dict[int, Row] = {}
        drafts = None if self.write is None else self.write / f"unfinished-{os.getpid()}"
        for row in rows:
            show(row)
            measured[id(row)] = row
            if drafts is not None:
                results.save(kind, [*measured.values()], drafts, command, device=device, machine=machine)
        if self.json_output and measured:
            print(json.dumps([*measured.values()], indent=1))
        if self.write is not None and drafts is not None and measured:
            path = results.save(kind, [*measured.values()], self.write, command, device=device, machine=machine)
            shutil.rmtree(drafts)
            print(f"written: {path}", file=sys.stderr)
        return [*measured.values()]

    def finish(
        self,
        kind: str,
        rows: Iterable[Row],
        command: str,
        show: Callable[[Row], object] = lambda row: None,
        *,
        device: str = "auto",
    ) -> int:
        """As `keep`, and return the exit code: 1 if a row failed."""
        return int(any("error" in row for row in self.keep(kind, rows, command, show, device=device)))


TO_STDOUT = Output()


def device_named(name: str) -> str:
    """Return the device type that `--device` selects."""
    from octavo.train.device import resolve

    return resolve(name).type


def known(flag: str, name: str, names: Sequence[str], noun: str) -> str:
    """Return `name` if it is one of `names`.

    Raises:
        ConfigError: it is not.
    """
    if name not in names:
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


def command_line(*words: str, **flags: Any) -> str:
    """Return the command that measures again: flags by name, left out if None, False or empty, repeated if a tuple."""
    for name, value in flags.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is None or one is False:
                continue
            shown = "" if one is True else f' "{one}"' if " " in str(one) else f" {one}"
            words = (*words, f"--{name.replace('_', '-')}{shown}")
    return " ".join(words)
