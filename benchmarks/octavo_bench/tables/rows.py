"""Rows of results, as groups and as lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo_bench.tables.markdown import table

Row = dict[str, Any]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of `keys`, both in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def figures(names: Sequence[str], columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    """Return a table of rows: what names them, then their figures; the error of a row that failed in the first."""
    shown = [column for column in columns if any(column[1] in row for row in rows)]
    body = []
    for row in rows:
        figures = [form.format(row[key]) if key in row else "" for _, key, form in shown]
        if "error" in row:
            figures[0] = f"failed: {row['error']}"
        body.append((*(row[name] for name in names), *figures))
    return table((*names, *(title for title, *_ in shown)), body)
