"""`octavo doctor`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter


def doctor(
    *,
    device: str = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Look at this machine: hardware, versions, which FP8 kernels run, and whether they compute correctly.

    Exits with 1 when a check fails.

    Examples:

        octavo doctor
        octavo doctor --device cpu --json

    Parameters
    ----------
    device
        auto, cpu, cuda or cuda:INDEX.
    json_output
        Print the findings as JSON.
    """
    from octavo.cli.findings import examine

    findings = examine(device)
    if json_output:
        print(json.dumps(findings, indent=2))
    else:
        _show(findings)
    return 0 if findings["passed"] else 1


def _show(findings: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for title in ("hardware", "versions", "packages"):
        _pairs(console, title, findings[title])
    _rows(console, "kernels", findings["kernels"])
    _rows(console, "self-check: signal to noise against FP64", findings["selfcheck"])
    verdict = "All checks passed." if findings["passed"] else f"FAILED: {', '.join(findings['failures'])}."
    console.print(f"\n{verdict}", markup=False)


def _pairs(console: Any, title: str, pairs: Mapping[str, Any]) -> None:
    console.print(f"\n{title}", style="bold", markup=False)
    width = max(map(len, pairs)) + 2
    for key, value in pairs.items():
        console.print(f"  {key:<{width}}{value}", markup=False, soft_wrap=True)


def _rows(console: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    console.print(f"\n{title}", style="bold", markup=False)
    table = Table(box=None, padding=(0, 1, 0, 2), pad_edge=True)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
