from __future__ import annotations

import math

from octavo.lab.train.plot import COLOURS, plot


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


def test_marks_are_upright_lines_behind_the_curves() -> None:
    text = plot({"a": [(0, 1.0), (100, 2.0)]}, width=21, height=4, marks={"switch": [50], "outside": [101]}).plain
    rows = text.splitlines()[:4]
    at = rows[0].index("┊")
    assert [row[at] == "┊" for row in rows].count(True) == 2  # the curve passes in front of it
    assert rows[0].count("┊") == 1 and "┊ switch" in text
    assert "┊" not in plot({"a": [(0, 1.0), (100, 2.0)]}, marks={"switch": []}).plain


def test_more_curves_than_colours_are_all_drawn() -> None:
    many = {str(i): [(0.0, float(i)), (1.0, float(i))] for i in range(12)}
    lines = plot(many, height=12).plain.splitlines()
    assert all(any(chr(0x2801) <= c <= chr(0x28FF) for c in line) for line in lines[:12])


def test_the_unit_of_the_xs() -> None:
    assert "tokens 100" in plot({"a": [(0, 1.0), (100, 2.0)]}, unit="tokens").plain


def test_two_equal_curves_are_both_seen() -> None:
    curve = [(0, 2.0), (100, 1.0)]
    text = plot({"a": curve, "b": curve}, width=40, height=6)
    drawn = [span.style for span in text.spans if chr(0x2800) < text.plain[span.start] <= chr(0x28FF)]
    assert {*drawn} == {*COLOURS[:2]} and abs(drawn.count(COLOURS[0]) - drawn.count(COLOURS[1])) <= 4
