"""Output to a terminal. Text from files and arguments is shown, and cannot command the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, float], None]
"""Called before each part of a long job: what it does, and the share of all work that is done, 0 to 1."""


def silent(doing: str, done: float) -> None:
    """Report nothing."""


Item = TypeVar("Item")


def reported(items: Iterable[Item], total: int, doing: str, report: Report) -> Iterator[Item]:
    """Yield items, and report before each how many of all are done."""
    for number, item in enumerate(items):
        report(f"{doing} {number + 1} of {total}", number / total)
        yield item


# C0 and C1 controls but tab and newline, marks that reorder text, line separators, and halves of characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Return the text with an escape such as `\x1b` in place of each character that acts on a terminal."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def program() -> str:
    """Return how to call `octavo` from here: its path where the shell would find none, or another one, by the name."""
    own = Path(sys.argv[0])
    if own.name != "octavo" or not own.is_file():  # called from Python, by python -m or under torchrun
        return "octavo"
    found = shutil.which("octavo")
    return "octavo" if found and own.samefile(found) else os.path.relpath(own)


def say(*texts: object, to_stderr: bool = False) -> None:
    """Print texts, a line each."""
    stream: TextIO = sys.stderr if to_stderr else sys.stdout
    print("\n".join(map(printable, texts)), file=stream, flush=True)


def hanging(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of columns wrapped to the terminal, under their last column; in a pipe as they are."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in lines:
        last = [found.end() for found in re.finditer(r" {2,}", line.rstrip())]
        indent = last[-1] if last and last[-1] < width - 20 else 4
        yield textwrap.fill(line, width, subsequent_indent=" " * indent, drop_whitespace=True) if width else line


def filled(text: str, width: int) -> str:
    """Return text in lines of at most `width` characters, a number and its percent sign on one of them."""
    return textwrap.fill(text.replace(" %", "\xa0%"), width).replace("\xa0%", " %")


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return a line of text per row, cells aligned in columns, those of the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in aligned]


def console(*, stderr: bool = False, file: TextIO | None = None) -> Console:
    """Return a console of rich that prints text as `printable` does, without marking up numbers.

    To a `file` it prints plain text in 100 columns, whatever the environment says of the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *arguments: Any, **keywords: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*arguments, **keywords):
                yield Segment(text if control else printable(text), style, control)

    if file is not None:
        return Printable(file=file, highlight=False, width=100, force_terminal=False, color_system=None)
    return Printable(stderr=stderr, highlight=False)


def quantity(number: float, noun: str) -> str:
    """Return a number with its noun: `1 layer`, `1,200 layers`."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def and_more(found: Sequence[object]) -> str:
    """Return how many there are beside the first, as ` (and 2 more)`; empty for none."""
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def clock(seconds: float) -> str:
    """Format a duration as 0:07, 12:34 or 1:02:03."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


@contextmanager
def progress() -> Iterator[Report]:
    """Show on a terminal what a job does, the share done and the time left; elsewhere nothing.

    The time left is that of the remaining work at the speed so far. It is shown from the first part that is done.
    """
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.text import Text

    screen, ends = console(stderr=True), float("nan")

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if ends != ends else f"{clock(max(ends - time.monotonic(), 0))} left")

    if not screen.is_terminal:
        yield silent
        return
    columns = BarColumn(bar_width=30), TaskProgressColumn(), Left(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=screen, transient=True) as shown:
        task, began = shown.add_task("", total=1.0), time.monotonic()

        def report(doing: str, done: float) -> None:
            nonlocal began, ends
            now = time.monotonic()
            began = began if done else now  # a further job
            ends = now + (now - began) * (1 - done) / done if done else float("nan")
            shown.update(task, completed=done, description=doing, refresh=True)

        yield report
