"""Output to a terminal. Text from files and arguments is shown, and cannot command the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# C0 and C1 controls but tab and newline, marks that reorder text, line separators, and halves of characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Return the text with an escape such as `\x1b` in place of each character that acts on a terminal."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], str(text))


def say(*texts: object, to_stderr: bool = False) -> None:
    """Print texts, a line each."""
    stream: TextIO = sys.stderr if to_stderr else sys.stdout
    print("\n".join(map(printable, texts)), file=stream, flush=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console of rich that prints text as `printable` does, without marking up numbers."""
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *arguments: Any, **keywords: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*arguments, **keywords):
                yield Segment(text if control else printable(text), style, control)

    return Printable(stderr=stderr, highlight=False)
