"""Progress of a run in a terminal: a live table and a final report; plain lines in a pipe."""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from octavo import __version__
from octavo._util import terminal
from octavo._util.recipe_names import FALLBACK
from octavo._util.terminal import quantity
from octavo.lab.guard.alarms import GuardEvent
from octavo.lab.monitor.console import FILE, ConsoleFile
from octavo.lab.train import events
from octavo.lab.train.config import RunConfig, reason_for_fallback
from octavo.lab.train.setup import trains_with
from octavo.lab.train.summary import final_report

_ROWS = 12
SLOW_ON_A_CPU = "CPUs emulate FP8: slower than BF16 here, with the same numerics as on a GPU"
_WIDTH = 11
NOT_KNOWN = "-"
OTHERS = (FALLBACK, "block", "rowwise")
"""Recipes to try next."""


class ConsoleReporter:
    """Writes a run to a terminal or to a file."""

    def __init__(
        self,
        console: Console | None = None,
        program: str = "octavo",
        export_flags: Callable[[Path], str | None] = lambda run: None,
        *,
        keep: bool = False,
    ) -> None:
        """Write to a console.

        Args:
            program: how to call `octavo`.
            export_flags: (directory of a finished run) -> what follows it in `octavo export`, or None if it cannot be
                exported. By default an export is not suggested.
            keep: write all of it, as in a pipe, to `console.log` of the run's directory too, with warnings of this
                process and the error that ends the run.
        """
        # No markup and no highlighting of measured values.
        self._console = console or terminal.console()
        self._kept = KeptConsole() if keep else None
        self._program = program
        self._export_flags = export_flags
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._columns: list[str] = []
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._tokens = 0
        self._config: RunConfig | None = None
        self._speeds: deque[float] = deque(maxlen=_ROWS)

    def report(self, event: events.Event) -> None:
        """Show one event."""
        match event:
            case events.Preparing():
                self._say(f"octavo {__version__}: reading {_text(event.config)} and building the models ...")
            case events.Started():
                self._start(event)
            case events.Logged():
                self._log(event)
            case events.Switched(step=1, recipe="bf16"):
                self._say("step 1: the FP8 model computes in BF16 at first, so that both models share their start")
            case events.Switched():
                self._say(f"step {event.step}: the FP8 model switches to recipe '{event.recipe}'")
            case events.Scoring() if self._live is not None and self._progress is not None:
                self._progress.update(self._task, completed=event.step, left=f"held-out text: {event.computed}")
                self._live.update(self._screen())
            case events.Evaluated():
                losses = "  ".join(f"{model.upper()} {loss:.4f}" for model, loss in event.loss.items())
                self._say(f"step {event.step}: held-out loss  {losses}")
            case events.Sampled():
                for model, text in event.text.items():
                    self._say(f"step {event.step}: {events.MODELS[model]} continues {_end(event.prompt)!r}: {text!r}")
            case GuardEvent() if event.level != "info" or event.action:
                action = f" -> {event.action}" if event.action else ""
                self._say(f"step {event.step}: {f'[{event.cause}] ' if event.cause else ''}{event.text}{action}")
            case events.Saved():
                self._say(f"step {event.step}: checkpoint {event.path}")
            case events.Moved() if self._kept is not None:
                self._kept.move(event.directory)
            case events.Finished():
                self._close_live()
                commands = self._next(event)
                for console in self._consoles():
                    final_report(console, event, commands, self._program)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the table on the screen and restore the cursor."""
        self._close_live()
        if self._kept is not None:
            self._kept.close(error)

    def _close_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _consoles(self) -> Sequence[Console]:
        return (self._console,) if self._kept is None else (self._console, self._kept.console)

    def _start(self, event: events.Started) -> None:
        self._config = event.config
        if self._kept is not None:
            self._kept.open(event.config.run.out)
        run, data = event.config.run, event.config.data
        baseline = " beside BF16" if len(event.models) == 2 else ""
        self._say(
            f"{event.config.model.architecture.capitalize()}, {_count(event.parameters)} parameters, recipe"
            f" {run.recipe}{baseline}, on {event.device}"
        )
        if reason := reason_for_fallback(event.config):
            self._say(reason)
        self._say(
            f"{quantity(run.steps, 'step')} of {run.batch} x {data.sequence} tokens, {event.config.tokens:,} in all;"
            f" results in {run.out}"
        )
        self._tokens = event.config.tokens
        if event.plan is not None and not any(layer.is_fp8 for layer in event.plan.layers):
            self._say("no layer is in FP8: octavo plan RUN gives the reasons")
        elif event.plan is not None and event.plan.device == "cpu":
            self._say(SLOW_ON_A_CPU)
        if event.first_step:
            done = " of a complete run: --steps N makes it longer" if event.first_step >= run.steps else ""
            self._say(f"resumed after step {event.first_step}{done}")
        losses = [f"loss {events.MODELS[model]}" for model in event.models]
        gap = ["gap %"] if len(losses) == 2 else []
        self._columns = ["step", *losses, *gap, "tokens/s", "lr", "grad norm", "left"]
        self._say_row(self._columns)
        if self._console.is_terminal:
            on_cpu = event.plan is None or event.plan.device == "cpu"
            self._open_live(run.steps, event.first_step, "" if on_cpu else "first step: compiling")

    def _open_live(self, steps: int, done: int, doing: str) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, left=doing)
        self._live = Live(self._screen(), console=self._console, refresh_per_second=4)
        self._live.start()

    def _log(self, event: events.Logged) -> None:
        left = self._time_left(event)
        self._rows.append([*_cells(event), left])
        self._say_row(self._rows[-1])
        if self._live is None or self._progress is None:
            return
        self._progress.update(self._task, completed=event.step, left=f"{left} left" if left != NOT_KNOWN else "")
        self._live.update(self._screen())

    def _time_left(self, event: events.Logged) -> str:
        """Return the time to the last step at the median speed; not known from the first line, whose step compiles."""
        if not self._rows:
            return NOT_KNOWN
        self._speeds.append(event.tokens_per_second)
        speeds = sorted(self._speeds)
        return terminal.clock((self._tokens - event.tokens) / speeds[len(speeds) // 2])

    def _screen(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in self._columns:
            table.add_column(title, justify="right", min_width=8)
        for row in self._rows:
            table.add_row(*row)
        return Group(table, *([self._progress] if self._progress else []))

    def _next(self, event: events.Finished) -> list[tuple[str, str]]:
        """Return the commands to continue with, which all work: purpose, and what follows `octavo`."""
        run = quote(str(event.directory))
        commands = [("loss and telemetry", f"dashboard {run}"), ("plan per layer", f"plan {run}")]
        commands.append(("evaluate", f"eval {run}"))
        if (flags := self._export_flags(event.directory)) is not None:
            commands.append(("export for serving", f"export {run}{flags}"))
        commands.append(("train longer", f"train {run} --resume --steps {2 * event.summary['steps']}"))
        if other := next(self._others(event.directory, event.summary["recipe"]), ""):
            out = quote(f"{event.directory}-{other}")
            commands.append(("another recipe", f"train {run} --recipe {other} --out {out}"))
        return commands

    def _others(self, run: Path, recipe: str) -> Iterator[str]:
        """Yield the recipes to try next that this run can be trained with, in a directory that is not there yet."""
        for other in OTHERS:
            is_free = other != recipe and not Path(f"{run}-{other}").exists()
            if is_free and self._config is not None and trains_with(self._config, other):
                yield other

    def _say(self, line: str) -> None:
        for console in self._consoles():
            console.print(line, markup=False, soft_wrap=True)

    def _say_row(self, cells: Sequence[str]) -> None:
        """Print a row of the table as a line, but to a terminal, whose live table has it."""
        for console in self._consoles():
            if not console.is_terminal:
                console.print("".join(cell.rjust(_WIDTH) for cell in cells), markup=False, soft_wrap=True)


class KeptConsole:
    """The console of `console.log`. From `open` to `close` it also gets warnings of this process."""

    def __init__(self) -> None:
        self._file = ConsoleFile()
        self._file.write(time.strftime("--- %Y-%m-%d %H:%M:%S UTC\n", time.gmtime()))
        self.console = terminal.console(file=cast(TextIO, self._file))
        self._undo = ExitStack()

    def open(self, directory: Path) -> None:
        """Write to the file of this directory, below the lines that it has, and take warnings."""
        self._file.open(directory / FILE)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *where: Any) -> None:
            shown(message, category, filename, lineno, *where)
            self._print(warnings.formatwarning(str(message), category, filename, lineno, line=""))

        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._print(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("octavo")
        logger.addHandler(handler)
        self._undo.callback(logger.removeHandler, handler)
        self._undo.callback(setattr, warnings, "showwarning", shown)
        warnings.showwarning = cast(Any, show)

    def move(self, directory: Path) -> None:
        """Go on in the file of this directory, with all that was written."""
        self._file.move(directory / FILE)

    def close(self, error: BaseException | None) -> None:
        """Take no more warnings, and write the error that ended the run, if one did."""
        self._undo.close()
        if error is not None:
            self._print(f"octavo: error: {error}" if str(error) else f"octavo: {type(error).__name__}")
        self._file.close()

    def _print(self, text: str) -> None:
        self.console.print(text.rstrip(), markup=False, soft_wrap=True)


def _cells(event: events.Logged) -> list[str]:
    gap = events.gap_percent(event.loss)
    shown = NOT_KNOWN if gap is None else f"{gap:+z.2f}"
    return [
        str(event.step),
        *(f"{loss:.4f}" for loss in event.loss.values()),
        *([shown] if len(event.loss) == 2 else []),
        f"{event.tokens_per_second:,.0f}",
        f"{event.lr:.1e}",
        f"{next(iter(event.gradient_norm.values())):.3f}",
    ]


def _text(config: RunConfig) -> str:
    source = config.data.source
    return "Python's standard library" if source == "python" else f"'{source}'"


def _end(prompt: str, longest: int = 24) -> str:
    """Return the end of a prompt."""
    return prompt if len(prompt) <= longest else f"...{prompt[-longest:]}"


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"
