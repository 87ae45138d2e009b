"""Text from files is shown in a terminal, and does not command it."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

from octavo._util import terminal
from octavo._util.terminal import columns, hanging, printable, say

SOURCES = Path(__file__).parents[2] / "src/octavo"
EVIL = "a\x1b[2Jb\x9bc\rd\u202ee\x07\x7f\udce9\u2028"
SHOWN = r"a\x1b[2Jb\x9bc\rd\u202ee\x07\x7f\udce9\u2028"


def test_characters_that_act_are_escapes_and_others_stay() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("caf\u00e9 \u4e16\u754c \U0001f600\n\tz\\x1b") == "caf\u00e9 \u4e16\u754c \U0001f600\n\tz\\x1b"


def test_what_is_said_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL, Path(EVIL))
    say(EVIL, to_stderr=True)
    assert capsys.readouterr() == (f"{SHOWN}\n{SHOWN}\n", f"{SHOWN}\n")


def test_a_console_colours_and_prints_text_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    monkeypatch.setattr("sys.stdout", stream := io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = terminal.console()
    table = Table(EVIL)
    table.add_row(Text(EVIL, style="red"))
    console.print(table, EVIL, markup=False)
    written = stream.getvalue()
    assert "\x1b[31m" in written  # the style
    assert "\x1b[2J" not in written and not set("\x9b\u202e\x07") & set(written)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_the_time_left_from_the_first_part_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sys.stderr", stream := Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.progress() as report:
        for doing, done in (("first", 0.0), (EVIL, 0.1), ("third", 0.5), ("another job", 0.0), ("its half", 0.5)):
            report(doing, done)
            now[0] += 30
    written = stream.getvalue()
    assert "4:30 left" in written  # 30 s for a tenth
    assert "1:00 left" in written  # 60 s for a half
    assert written.count("0:30 left") == 1  # a job of its own, which began 30 s ago
    assert "\x1b[2Jb" not in written


def test_progress_in_a_pipe_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as report:
        report("first", 0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_a_clock(seconds: float, text: str) -> None:
    assert terminal.clock(seconds) == text


def test_all_that_commands_print_goes_this_way() -> None:
    files = [
        *(SOURCES / "lab" / "cli").glob("*.py"),
        SOURCES / "lab" / "train" / "console.py",
        SOURCES / "lab" / "train" / "summary.py",
    ]
    calls = [
        node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    names = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    assert "say" in names and not names & {"print", "Console"}


@pytest.mark.parametrize(("number", "text"), [(0, "0 layers"), (1, "1 layer"), (1200, "1,200 layers")])
def test_a_count_and_its_noun(number: int, text: str) -> None:
    assert terminal.quantity(number, "layer") == text


def test_columns_wrap_under_the_last_one_in_a_terminal_and_not_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = columns([("first", "one two three four five six"), ("2", "seven")])
    assert [*hanging(lines)] == lines
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    assert [*hanging(lines)] == ["first  one two three four five\n       six", "2      seven"]


def test_a_number_and_its_percent_sign_stay_on_one_line() -> None:
    assert terminal.filled("it is +0.04 % ± 0.02 % now", 14) == "it is +0.04 %\n± 0.02 % now"
    assert terminal.filled("it is +0.04 %", 12) == "it is\n+0.04 %"
