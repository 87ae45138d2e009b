"""`octavo doctor`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from cyclopts import Parameter


def doctor(
    *,
    device: str = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Look at this machine: hardware, versions, which FP8 kernels run, and whether they compute correctly.

    On a GPU the first call compiles every kernel, which can take minutes. Exits with 1 when a check fails.

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
    _rows(console, "kernels: of each operation, the first that is available runs", _merged(findings["kernels"]))
    _rows(console, "self-check: signal to noise against FP64", findings["selfcheck"])
    _rows(console, "self-check: Triton kernels against their reference", _by_kernel(findings["triton"]))
    if findings["triton_skipped"]:
        console.print(f"  not made, it needs a GPU: {findings['triton_skipped']}", markup=False)
    verdict = "All checks passed." if findings["passed"] else f"FAILED: {', '.join(findings['failures'])}."
    console.print("\n".join(["", verdict, *findings["remedies"]]), markup=False)


def _merged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for all operations whose rows are otherwise the same; the reference, which takes all, is last."""
    operations: dict[tuple[Any, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["kernel"] == "reference"):
        operations.setdefault((row["kernel"], row["available"], row["reason"]), []).append(row["operation"])
    return [
        {"kernel": kernel, "operations": ", ".join(names), "available": available, "reason": reason}
        for (kernel, available, reason), names in operations.items()
    ]


def _by_kernel(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a kernel, and below it one a case that failed."""
    shown: list[dict[str, Any]] = []
    for kernel, group in groupby(rows, key=lambda row: row["kernel"]):
        cases = list(group)
        passed = sum(row["passed"] for row in cases)
        shown.append({"kernel": kernel, "cases": f"{passed} of {len(cases)} passed", "detail": ""})
        shown += [{"kernel": "", "cases": row["case"], "detail": row["detail"]} for row in cases if not row["passed"]]
    return shown


def _pairs(console: Any, title: str, pairs: Mapping[str, Any]) -> None:
    console.print(f"\n{title}", style="bold", markup=False)
    width = max(map(len, pairs)) + 2
    for key, value in pairs.items():
        console.print(f"  {key:<{width}}{value}", markup=False, soft_wrap=True)


def _rows(console: Any, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    console.print(f"\n{title}", style="bold", markup=False)
    if not rows:
        return
    table = Table(box=None, padding=(0, 1, 0, 2), pad_edge=True)
    for key in rows[0]:
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
