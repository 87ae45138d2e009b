"""The small files of a run: JSON documents and the metrics log."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo._util.files import os_errors, write_text
from octavo._util.terminal import quantity
from octavo.errors import RunError
from octavo.lab.guard.alarms import GuardEvent
from octavo.lab.monitor import samples
from octavo.lab.train.events import Evaluated, Event, Logged, Moved, Sampled, Switched


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically.

    Raises:
        RunError: it could not be written; an existing file stays unchanged.
    """
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n", RunError)


class EventFile:
    """A file of one line per event of some kinds, written as it happens."""

    kinds: tuple[type[Logged | Switched | Evaluated | Sampled], ...]
    """The events that are lines."""

    def __init__(self, path: Path, *, keep_until: int, keep_lines: int | None = None) -> None:
        """Open `path` and keep the lines up to step `keep_until`: a resumed run writes the others again.

        Args:
            keep_lines: `lines` when the checkpoint was written; later ones of its step are written again, too.
        """
        self._path = path
        self.lines = 0
        """Number of lines in the file."""
        self._truncate(keep_until, keep_lines)

    def report(self, event: Event) -> None:
        """Write the event if it is a line."""
        if isinstance(event, self.kinds):
            if self._path.parent.exists() and not self._path.exists():
                warnings.warn(f"{self._path}: was removed during the run, and is written again.", stacklevel=2)
                self.copy_to(self._path)
                self._open()
            with os_errors(self._path, RunError):
                self._file.write(_line(event.record()))
            self.lines += 1
        elif isinstance(event, GuardEvent) and event.back_to is not None:
            self._file.close()
            self._truncate(event.back_to)
        elif isinstance(event, Moved):
            self.copy_to(event.directory / self._path.name)

    def _truncate(self, keep_until: int, keep_lines: int | None = None) -> None:
        """Keep some lines, or if this process is killed, all of them, and open the file."""
        kept = [line for line in self.read(self._path)[:keep_lines] if line["step"] <= keep_until]
        write_text(self._path, "".join(map(_line, kept)), RunError)
        with os_errors(self._path, RunError):
            self._open()
        self.lines = len(kept)

    @staticmethod
    def read(path: Path) -> list[Mapping[str, Any]]:
        """Return the lines of such a file, none if there is no file; errors name the line."""
        raise NotImplementedError

    def _open(self) -> None:
        self._file = self._path.open("a+", encoding="utf-8", buffering=1)

    def copy_to(self, path: Path) -> None:
        """Write all lines to another file, also if this one has been removed."""
        self._file.seek(0)
        with os_errors(path, RunError):
            path.write_text(self._file.read(), encoding="utf-8")

    def close(self, error: BaseException | None = None) -> None:
        """Close the file."""
        with os_errors(self._path, RunError):
            self._file.close()


class MetricsFile(EventFile):
    """`metrics.jsonl`: one line per logged step, change of recipe or evaluation."""

    kinds = (Logged, Switched, Evaluated)

    @staticmethod
    def read(path: Path) -> list[Mapping[str, Any]]:
        """Return `read_metrics`."""
        return [*read_metrics(path)]


class SamplesFile(EventFile):
    """`samples.jsonl`: one line per sample."""

    kinds = (Sampled,)

    @staticmethod
    def read(path: Path) -> list[Mapping[str, Any]]:
        """Return the samples of a file, none if there is no file. Lines that are none are left out with a warning.

        Raises:
            RunError: the file cannot be read.
        """
        with os_errors(path, RunError, "cannot be read"):
            found, damaged = samples.parse(path.read_text("utf-8", "replace") if path.exists() else "")
        if damaged:
            warnings.warn(f"{path}: {quantity(damaged, 'line')} without a sample, left out.", stacklevel=2)
        return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, none if there is no file. An incomplete last line is left out.

    Raises:
        RunError: the file cannot be read, or a line is not one of metrics; the message names it.
    """
    if not path.exists():
        return []
    lines = config_reader.read_text(path, RunError).split("\n")[:-1]
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    remedy = "Remove the line, or move the file away: a resumed run writes a new one."
    try:
        record = config_reader.parse(line, where, RunError)
    except RunError as error:
        raise RunError(f"{error} {remedy}") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise RunError(f"{where}: a line of metrics is an object with a whole number 'step'. {remedy}")
    for key, value in record.items():
        if key != "recipe_fp8" and not (value is None or (isinstance(value, int | float) and math.isfinite(value))):
            raise RunError(f"{where}: '{key}' is {config_reader.shown(value)}, not a number or null. {remedy}")
    return record


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
