"""`octavo doctor`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.doctor.check import Result
    from octavo.doctor.examination import Examination

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failure": ("FAIL", "bold red"), "skipped": ("-", "dim")}
"""How a verdict is shown, and in which style."""


def doctor(
    target: Path | None = None,
    /,
    *,
    preset: str | None = None,
    model: str | None = None,
    recipe: str | None = None,
    device: str = "auto",
    only: Annotated[list[str] | None, Parameter(negative=())] = None,
    trace: Path | None = None,
    verbose: Annotated[bool, Parameter(alias="-v", negative=())] = False,
    report: Annotated[bool, Parameter(negative=())] = False,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Look for what is wrong with this machine, with a model on it, or with a run; and say what to do about it.

    Without TARGET the machine is examined: on a GPU the first time compiles every kernel, which can take minutes.

    With a run file, a preset or --model, the model makes a few steps, which change none of its weights.

    With the directory of a run, the weights it has reached do, and what it recorded is looked at.

    Exits with 1 when a check fails.

    Examples:

        octavo doctor
        octavo doctor my.toml --trace traces
        octavo doctor runs/demo
        octavo doctor --model mine:build --recipe block
        octavo doctor --report > report.md

    Parameters
    ----------
    target
        Run file, .toml or .json, or directory of a run.
    preset
        demo, tiny or another of `octavo train`, in place of a run file.
    model
        MODULE:FUNCTION of your own that returns (model, loss function of one batch).
    recipe
        Recipe in place of the run's; with --model by default folded.
    device
        auto, cpu, cuda or cuda:INDEX.
    only
        Name of a check to make, such as 'triton kernels'; may be given again.
    trace
        Directory for a Chrome trace of a few steps, on a GPU.
    verbose
        Show the details of every check.
    report
        Print a Markdown block for a bug report, without paths and secrets.
    json_output
        Print the findings as JSON.
    """
    if report and json_output:
        raise ConfigError("--report and --json both say how to print: take one.")
    if sum(given is not None for given in (target, preset, model)) > 1:
        raise ConfigError("a run file or run, --preset and --model each name what to look at: take one.")
    from octavo.doctor.examination import examination

    found = examination(target, preset=preset, model=model, recipe=recipe, device=device, only=only or (), trace=trace)
    _carry_out(found, quiet=report or json_output, verbose=verbose)
    if json_output:
        print(json.dumps(found.to_dict(), indent=2))
    elif report:
        from octavo.doctor.report import markdown

        print(markdown(found))
    return 0 if found.passed else 1


def _carry_out(examination: Examination, *, quiet: bool, verbose: bool) -> None:
    """Make the checks; show each as it ends, or only on stderr which one runs."""
    from rich.console import Console

    console, progress = Console(highlight=False), Console(stderr=True)
    shown = ""
    for kind, check, make in examination.begin():
        with progress.status(f"{kind}: {check.name}"):
            result = make()
        if quiet:
            continue
        if kind != shown:
            console.print(f"\n{kind}", style="bold")
            shown = kind
        _line(console, result)
        if verbose:
            _details(console, result)
    if not quiet:
        _close(console, examination)


def _line(console: Any, result: Result) -> None:
    mark, style = MARKS[result.finding.verdict]
    _row(console, (mark, style), result.check.name, result.finding.seen, dim=style == "dim")


def _row(console: Any, mark: tuple[str, str], name: str, text: str, *, dim: bool = False) -> None:
    """Print one line in columns; what is too long goes on below, in its column."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 2), pad_edge=True)
    table.add_column(width=7)
    table.add_column(width=17)
    table.add_column(overflow="fold")
    table.add_row(Text(mark[0], style=mark[1]), name, Text(text, style="dim" if dim else ""))
    console.print(table)


def _details(console: Any, result: Result) -> None:
    """Print the numbers, or the table, that a check saw."""
    from rich.padding import Padding
    from rich.table import Table

    rows: Sequence[Mapping[str, Any]] = result.finding.rows or [
        {"": key, "seen": value} for key, value in result.finding.numbers.items()
    ]
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for key, value in rows[0].items():
        table.add_column(key.replace("_", " "), overflow="fold", no_wrap=not isinstance(value, str))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(Padding(table, (0, 0, 0, 9)))


def _close(console: Any, examination: Examination) -> None:
    """Print what to do, then how it went."""
    remedies = [(result.check.name, result.remedy) for _, result in examination.results if result.remedy]
    if remedies:
        console.print("\nwhat to do", style="bold")
    for name, remedy in remedies:
        _row(console, ("->", ""), name, remedy)
    failed = [result.check.name for _, result in examination.results if result.finding.verdict == "failure"]
    counted = ", ".join(f"{count} {verdict}" for verdict, count in examination.count.items())
    told = f"FAILED: {', '.join(failed)}." if failed else "No check failed."
    console.print(f"\n{told} ({counted})", style="bold red" if failed else "", markup=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
