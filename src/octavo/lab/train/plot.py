"""Terminal plots with braille dots: two across and four down per character."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle

from rich.text import Text

Points = Sequence[tuple[float, float]]
COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue", "white")
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
    every = [point for points in drawn.values() for point in points]
    if not every:
        return Text("(nothing to plot)")
    frame = _Frame(every, width, height)
    for points, colour in zip(drawn.values(), cycle(COLOURS), strict=False):
        frame.draw(points, colour)
    marked = frame.columns(x for places in (marks or {}).values() for x in places)
    text = frame.text(drawn, marked, unit)
    return text.append("  ".join(f"┊ {name}" for name in marks)) if marks and marked else text


class _Frame:
    """Characters around the range of some points, with the dots drawn into them."""

    def __init__(self, points: Points, width: int, height: int) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self._low_x, self._high_x, self._low_y, self._high_y = min(xs), max(xs), min(ys), max(ys)
        self._width, self._height = width, height
        self._cells: dict[tuple[int, int], tuple[int, str]] = {}
        """(row, column) -> dots and their colour."""

    def columns(self, xs: Iterable[float]) -> set[int]:
        """Return the columns of the xs that are in the range."""
        return {round(self._across(x, self._width - 1)) for x in xs if self._low_x <= x <= self._high_x}

    def _across(self, x: float, columns: int) -> float:
        return columns * (x - self._low_x) / ((self._high_x - self._low_x) or 1)

    def _place(self, x: float, y: float) -> tuple[float, float]:
        """Return column and row of a point, in dots."""
        down = (4 * self._height - 1) * (self._high_y - y) / ((self._high_y - self._low_y) or 1)
        return self._across(x, 2 * self._width - 1), down

    def draw(self, points: Points, colour: str) -> None:
        """Draw lines from point to point."""
        at = [self._place(x, y) for x, y in points]
        for (x0, y0), (x1, y1) in zip(at, at[1:] or at, strict=False):
            length = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
            for i in range(length + 1):
                column, row = round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)
                dots, before = self._cells.get((row // 4, column // 2), (0, ""))
                shown = before if before and column // 2 % _TURN < _TURN // 2 else colour
                self._cells[row // 4, column // 2] = (dots | _DOTS[column % 2][row % 4], shown)

    def text(self, names: Iterable[str], marked: Collection[int], unit: str) -> Text:
        """Return the frame with labels and legend, and vertical lines in the columns `marked`."""
        labels = {0: f"{self._high_y:.3g}", self._height - 1: f"{self._low_y:.3g}"}
        margin = max(map(len, labels.values()))
        text = Text()
        for row in range(self._height):
            text.append(f"{labels.get(row, ''):>{margin}} ┤" if row in labels else " " * margin + " │")
            for column in range(self._width):
                dots, colour = self._cells.get((row, column), (0, ""))
                text.append(chr(0x2800 + dots) if dots else "┊" if column in marked else " ", style=colour or None)
            text.append("\n")
        text.append(" " * margin + " └" + "─" * self._width + "\n")
        ends = f"{self._low_x:g}", f"{unit} {self._high_x:g}"
        text.append(" " * (margin + 2) + ends[0] + ends[1].rjust(self._width - len(ends[0])) + "\n")
        text.append(" " * (margin + 2))
        for name, colour in zip(names, cycle(COLOURS), strict=False):
            text.append(f"━━ {name}   ", style=colour)
        return text
