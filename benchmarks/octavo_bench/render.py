"""Tables in Markdown: rows of results by column specifications."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo_bench.results import Row

Table = Callable[[Path], str]
"""A table in Markdown, from the directory of results; empty if nothing of it was measured."""
Column = tuple[str, str]
"""Title, and the cell as a format of the row's keys: `("gap", "{gap_percent:+z.2f} %")`."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. A `|` in a cell is escaped, so that it stays in its cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values of `keys`, both in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def has_failed(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the text of an error in place of its figures."""
    return isinstance(row.get("error"), str)


def cell(form: str, row: Row) -> str:
    """Return the cell of a row, empty if a key is missing or None."""
    try:
        return form.format_map({key: value for key, value in row.items() if value is not None})
    except KeyError:
        return ""


def figures(columns: Sequence[Column], rows: Sequence[Row], names: int = 1, *, every: bool = False) -> str:
    """Return a table of rows. The first `names` columns name a row; the only figure of a failed row is its error.

    Args:
        every: also show columns for which no row has a figure.
    """
    shown = [c for i, c in enumerate(columns) if every or i < names or any(cell(c[1], row) for row in rows)]
    shown = shown if len(shown) > names else [*columns[: names + 1]]  # where all failed the errors need a column
    body = [[cell(form, row) for _, form in shown] for row in rows]
    for row, cells in zip(rows, body, strict=True):
        if has_failed(row):
            cells[names:] = [f"failed: {row['error']}", *[""] * (len(shown) - names - 1)]
    return table([title for title, _ in shown], body)
