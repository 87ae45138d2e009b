"""What the commands of `octavo bench` share: they measure, print a line a row, and write a result file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

bench = App(name="bench", help="Measure speed and accuracy, and write the result files that the tables are made from.")

Names = Annotated[tuple[str, ...], Parameter(negative=())]
Write = Annotated[
    Path | None,
    Parameter(
        negative=(),
        help="Directory of result files to write to, benchmarks/results in this repository. What the file of the day"
        " says of other workloads stays.",
    ),
]
Json = Annotated[
    bool,
    Parameter(name="--json", negative=(), help="Print the rows as JSON on stdout, the progress on stderr."),
]


def device_named(name: str) -> str:
    """Return the device that `--device` means."""
    from octavo.train.device import resolve

    return resolve(name).type


def printer(json_output: bool) -> Callable[[str], None]:
    """Return what prints a line of progress: to stderr where stdout is for JSON."""
    return lambda line: print(line, file=sys.stderr if json_output else sys.stdout, flush=True)


def finish(
    kind: str,
    rows: list[dict[str, Any]],
    write: Path | None,
    json_output: bool,
    command: str,
    *,
    device: str = "auto",
    hardware: str | None = None,
) -> int:
    """Print and write what was measured. Returns the exit code: 1 where a row failed.

    Args:
        hardware: what a result says in place of the device's name.
    """
    if json_output:
        print(json.dumps(rows, indent=1))
    if write is not None:
        from octavo_bench import results

        path = results.save(kind, rows, write, command, device=device, machine=hardware)
        print(f"written: {path}", file=sys.stderr)
    return 1 if any("error" in row for row in rows) else 0
