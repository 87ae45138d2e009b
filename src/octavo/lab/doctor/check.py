"""A check examines one thing and returns a verdict, the numbers it measured, and a remedy.

@check("disk", symptom="a run stops when it writes a checkpoint", remedy="Free some space.")
def disk(machine: Machine) -> Finding:
    free = shutil.disk_usage(machine.folder).free / GIB
    return (ok if free > 5 else failure)(f"{free:.0f} GiB free", free_gib=free)

A requirement, such as `needs=a_gpu`, is declared; without it the check is skipped. A check that judges readings
declares who takes them, `read=...`; so a test hands it the readings of a fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from octavo.errors import ConfigError

Subject = TypeVar("Subject")
Row = Mapping[str, Any]
Need = Callable[[Any], str]
"""Returns why a subject lacks what a check requires; empty if it does not. `subjects` has the common ones."""


class Verdict(StrEnum):
    """Outcome of a check. Only a failure makes the command exit with 1."""

    OK = "ok"
    WARNING = "warning"
    """Works, but is slower or less certain than it could be."""
    FAILURE = "failure"
    """Does not work, computes wrong numbers, or something other than requested."""
    SKIPPED = "skipped"
    """Nothing to check; `seen` gives the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a check: verdict, one line, and the numbers behind it."""

    verdict: Verdict
    seen: str
    """One line."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the line."""
    rows: Sequence[Row] = ()
    """Table of details; all rows have the same keys."""
    remedy: str = ""
    """Remedy for this case; replaces the check's."""


def ok(seen: str, *, rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding without fault."""
    return Finding(Verdict.OK, seen, numbers, rows)


def warning(seen: str, *, remedy: str = "", rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding of something slow or uncertain."""
    return Finding(Verdict.WARNING, seen, numbers, rows, remedy)


def failure(seen: str, *, remedy: str = "", rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding of a fault."""
    return Finding(Verdict.FAILURE, seen, numbers, rows, remedy)


def skipped(reason: str) -> Finding:
    """Return the finding of a check that did not apply."""
    return Finding(Verdict.SKIPPED, reason)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """One check."""

    name: str
    """One to three words, in lower case."""
    symptom: str
    """Symptom of the fault, as a user sees it."""
    remedy: str
    """Remedy, unless the finding has a better one."""
    look: Callable[[Any], Finding]
    """Function that checks what `read` returns. An exception counts as a failure."""
    needs: Need = lambda subject: ""
    """Requirement; without it the check is skipped."""
    read: Callable[[Subject], Any] = lambda subject: subject
    """Function that reads what the check looks at; by default the subject itself."""


class Result(NamedTuple):
    """A check that was run."""

    check: Check[Any]
    finding: Finding
    seconds: float
    """Duration."""

    @property
    def remedy(self) -> str:
        """Remedy; empty where none is needed."""
        if self.finding.verdict in (Verdict.OK, Verdict.SKIPPED):
            return ""
        return self.finding.remedy or self.check.remedy

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        seen = {"check": self.check.name, "verdict": str(self.finding.verdict), "seen": self.finding.seen}
        details = {"numbers": dict(self.finding.numbers), "rows": [dict(row) for row in self.finding.rows]}
        return {**seen, "remedy": self.remedy, "seconds": round(self.seconds, 3), **details}


def check(
    name: str, *, symptom: str, remedy: str, **options: Callable[[Any], Any]
) -> Callable[[Callable[[Any], Finding]], Check[Any]]:
    """Decorate a function as a check. Arguments are the fields of `Check`; `needs` and `read` are optional."""
    return lambda look: Check(name, symptom, remedy, look, **options)


def run_check(check: Check[Subject], subject: Subject) -> Result:
    """Run a check. An exception, of a driver or a compiler for example, is a failure that names it.

    Raises:
        ConfigError: the request itself was wrong.
    """
    start = time.perf_counter()
    try:
        missing = check.needs(subject)
        finding = skipped(missing) if missing else check.look(check.read(subject))
    except ConfigError:
        raise
    except Exception as error:
        finding = failure(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Result(check, finding, time.perf_counter() - start)
