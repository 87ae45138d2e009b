"""Terminal plots with braille dots: two across and four down per character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from rich.text import Text

Points = Sequence[tuple[float, float]]
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue", "white")
_MARK = -1
"""Marks a vertical line in place of a character's dots."""
_TURN = 4
"""Characters after which the colours of curves that share them repeat."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def plot(
    curves: Mapping[str, Points],
    *,
    width: int = 64,
    height: int = 10,
    unit: str = "step",
    marks: Mapping[str, Sequence[float]] | None = None,
) -> Text:
    """Return curves of `(x, y)` points in one frame, with their range at the axes and a legend.

    Characters shared by several curves take their colours in turn, so that two equal curves are both seen. Non-finite
    points are left out.

    Args:
        curves: name -> points.
        width: characters.
        height: lines.
        unit: unit of x.
        marks: label -> x values of vertical lines behind the curves.
    """
    drawn = {name: [p for p in points if abs(p[1]) < float("inf")] for name, points in curves.items()}
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    if not xs:
        return Text("(nothing to plot)")
    box = (min(xs), max(xs), min(ys), max(ys))
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    at = [x for places in (marks or {}).values() for x in places if box[0] <= x <= box[1]]
    for x in at:
        column = round((width - 1) * (x - box[0]) / ((box[1] - box[0]) or 1))
        cells |= {(row, column): (_MARK, "") for row in range(height)}
    for points, colour in zip(drawn.values(), cycle(COLOURS), strict=False):
        _draw(points, box, cells, colour, width, height)
    text = _frame(cells, box, list(drawn), width, height, unit)
    return text.append("  ".join(f"┊ {name}" for name in marks)) if marks and at else text


def _draw(
    points: Points,
    box: tuple[float, float, float, float],
    cells: dict[tuple[int, int], tuple[int, str]],
    colour: str,
    width: int,
    height: int,
) -> None:
    low_x, high_x, low_y, high_y = box
    columns, rows = 2 * width - 1, 4 * height - 1
    at = [
        (columns * (x - low_x) / ((high_x - low_x) or 1), rows * (high_y - y) / ((high_y - low_y) or 1))
        for x, y in points
    ]
    for (x0, y0), (x1, y1) in zip(at, at[1:] or at, strict=False):
        length = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
        for i in range(length + 1):
            column, row = round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)
            dots, before = cells.get((row // 4, column // 2), (0, ""))
            dots = 0 if dots == _MARK else dots
            shown = before if before and column // 2 % _TURN < _TURN // 2 else colour
            cells[row // 4, column // 2] = (dots | _DOTS[column % 2][row % 4], shown)


def _frame(
    cells: Mapping[tuple[int, int], tuple[int, str]],
    box: tuple[float, float, float, float],
    names: Sequence[str],
    width: int,
    height: int,
    unit: str,
) -> Text:
    low_x, high_x, low_y, high_y = box
    labels = {0: f"{high_y:.3g}", height - 1: f"{low_y:.3g}"}
    margin = max(map(len, labels.values()))
    text = Text()
    for row in range(height):
        text.append(f"{labels.get(row, ''):>{margin}} ┤" if row in labels else " " * margin + " │")
        for column in range(width):
            dots, colour = cells.get((row, column), (0, ""))
            character = "┊" if dots == _MARK else chr(0x2800 + dots) if dots else " "
            text.append(character, style=colour or None)
        text.append("\n")
    text.append(" " * margin + " └" + "─" * width + "\n")
    ends = f"{low_x:g}", f"{unit} {high_x:g}"
    text.append(" " * (margin + 2) + ends[0] + ends[1].rjust(width - len(ends[0])) + "\n")
    text.append(" " * (margin + 2))
    for name, colour in zip(names, cycle(COLOURS), strict=False):
        text.append(f"━━ {name}   ", style=colour)
    return text
