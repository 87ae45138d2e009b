"""Text from files is shown in a terminal, and does not command it."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

from octavo._util import terminal
from octavo._util.terminal import printable, say

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


def test_all_that_commands_print_goes_this_way() -> None:
    files = [*(SOURCES / "cli").glob("*.py"), SOURCES / "train/console.py", SOURCES / "train/final_report.py"]
    calls = [
        node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    names = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    assert "say" in names and not names & {"print", "Console"}
