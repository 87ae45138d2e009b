from __future__ import annotations

import math

from octavo.train.plot import plot


def rows(text: str) -> list[str]:
    return [line.split("┤" if "┤" in line else "│", 1)[1] for line in text.splitlines() if "┤" in line or "│" in line]


def test_a_falling_line_runs_from_the_upper_left_to_the_lower_right() -> None:
    drawn = rows(plot({"loss": [(0, 3.0), (100, 1.0)]}, width=20, height=5).plain)
    assert len(drawn) == 5
    columns = [[i for i, c in enumerate(row) if c != " "] for row in drawn]
    assert all(columns)
    assert columns[0][0] == 0
    assert columns[-1][-1] == 19
    assert [c[0] for c in columns] == sorted(c[0] for c in columns)


def test_ranges_and_legend_are_written() -> None:
    text = plot({"loss FP8": [(1, 5.5), (300, 1.25)], "loss BF16": [(1, 5.4), (300, 1.3)]}).plain
    assert "5.5 ┤" in text
    assert "1.25 ┤" in text
    assert "step 300" in text
    assert "loss FP8" in text
    assert "loss BF16" in text


def test_what_cannot_be_drawn_is_left_out() -> None:
    assert rows(plot({"a": [(0, math.nan), (1, 1.0), (2, math.inf), (3, 2.0)]}, height=3).plain)
    assert plot({"a": []}).plain == "(nothing to plot)"
    assert rows(plot({"a": [(1, 2.0)]}, height=3).plain)  # a single point has no range
