"""`octavo doctor`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from octavo._util import terminal
from octavo._util.terminal import say
from octavo.errors import ConfigError
from octavo.lab.cli.flags import Switch, check_recipes

if TYPE_CHECKING:
    from octavo.lab.doctor.check import Result
    from octavo.lab.doctor.examination import Examination

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failure": ("FAIL", "bold red"), "skipped": ("-", "dim")}
"""Mark and style of each verdict."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """How findings are printed."""

    verbose: Annotated[bool, Parameter(alias="-v", negative=())] = False
    """Show the details of every check."""
    report: Switch = False
    """Print a Markdown block for a bug report, without paths or secrets."""
    json: Switch = False
    """Print the findings as JSON."""


OUTPUT = OutputFlags()


def doctor(
    target: Path | None = None,
    /,
    *,
    preset: str | None = None,
    recipe: str | None = None,
    device: str = "auto",
    only: Annotated[list[str] | None, Parameter(negative=())] = None,
    trace: Path | None = None,
    output: OutputFlags = OUTPUT,
) -> int:
    """Find faults of this machine, of a model on it, or of a run, and suggest remedies.

    Without TARGET, checks the machine. On a GPU, the first time compiles every kernel, which can take minutes.

    With a run file, a preset, a Python file or a Hugging Face config, runs a few steps of the model, which leave its
    weights unchanged.

    With the directory of a run, uses the weights of its newest checkpoint, and checks its record as well.

    Exits with 1 if a check fails.

    Examples:

        octavo doctor
        octavo doctor my.toml --trace traces
        octavo doctor runs/demo
        octavo doctor mine.py --recipe block
        octavo doctor --report > report.md

    Parameters
    ----------
    target
        Run file, directory of a run, Python file with build() and batches(), or Hugging Face config.json.
    preset
        Preset of `octavo train`, in place of a run file.
    recipe
        Recipe, in place of the run's; of a Python file or a Hugging Face config by default rotated.
    device
        auto, cpu, cuda or cuda:INDEX.
    only
        Name of a check to run, such as 'triton kernels'; repeatable.
    trace
        Directory for a Chrome trace of a few steps (GPU only).
    """
    if output.report and output.json:
        raise ConfigError("--report and --json exclude each other.")
    if target is not None and preset is not None:
        raise ConfigError("give only one of TARGET and --preset.")
    check_recipes(recipe)
    from octavo.lab.doctor.examination import examination, markdown

    found = examination(target, preset=preset, recipe=recipe, device=device, only=only or (), trace=trace)
    _run(found, quiet=output.report or output.json, verbose=output.verbose)
    if output.json:
        say(json.dumps(found.to_dict(), indent=2))
    elif output.report:
        say(markdown(found))
    return 0 if found.passed else 1


def _run(examination: Examination, *, quiet: bool, verbose: bool) -> None:
    """Run the checks; print each result, or with `quiet` only the progress on stderr."""
    console, progress = terminal.console(), terminal.console(stderr=True)
    shown = ""
    for kind, check, run_check in examination.begin():
        with progress.status(f"{kind}: {check.name}"):
            result = run_check()
        if quiet:
            continue
        if kind != shown:
            console.print(f"\n{kind}", style="bold")
            shown = kind
        mark, style = MARKS[result.finding.verdict]
        _row(console, (mark, style), result.check.name, result.finding.seen, dim=style == "dim")
        if verbose:
            _details(console, result)
    if not quiet:
        _summarise(console, examination)


def _row(console: Any, mark: tuple[str, str], name: str, text: str, *, dim: bool = False) -> None:
    """Print one line in columns, wrapping long text within its column."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 2), pad_edge=True)
    table.add_column(width=7)
    table.add_column(width=17)
    table.add_column(overflow="fold")
    table.add_row(Text(mark[0], style=mark[1]), name, Text(text, style="dim" if dim else ""))
    console.print(table)


def _details(console: Any, result: Result) -> None:
    """Print the numbers or the table of a check."""
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


def _summarise(console: Any, examination: Examination) -> None:
    """Print the remedies and the summary."""
    remedies = [(result.check.name, result.remedy) for _, result in examination.results if result.remedy]
    if remedies:
        console.print("\nremedies", style="bold")
    for name, remedy in remedies:
        _row(console, ("->", ""), name, remedy)
    failed = [result.check.name for _, result in examination.results if result.finding.verdict == "failure"]
    counted = ", ".join(f"{count} {verdict}" for verdict, count in examination.count.items())
    summary = f"FAILED: {', '.join(failed)}." if failed else "No check failed."
    console.print(f"\n{summary} ({counted})", style="bold red" if failed else "", markup=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
