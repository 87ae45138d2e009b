"""What a check is: it looks at one thing, says what it saw in numbers, and what to do where that is not well.

@check("disk", symptom="a run stops when it writes a checkpoint", remedy="Free some space.")
def disk(machine: Machine) -> Finding:
    free = shutil.disk_usage(machine.folder).free / GIB
    return (ok if free > 5 else failure)(f"{free:.0f} GiB free", free_gib=free)

What only some machines or models have is declared, and the check is skipped where it is missing: `needs=a_gpu`.
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
"""Says of a subject why it has not what a check looks at; empty where it has. `subjects` has the common ones."""


def nothing(subject: object) -> str:
    """Need nothing."""
    return ""


class Verdict(StrEnum):
    """How a check ended. Only a failure is the command's exit code."""

    OK = "ok"
    WARNING = "warning"
    """It works, and is slower or less certain than it could be."""
    FAILURE = "failure"
    """It does not work, gives wrong numbers, or not what was asked for."""
    SKIPPED = "skipped"
    """There was nothing to look at; what was seen says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw."""

    verdict: Verdict
    seen: str
    """One line."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the line was made of."""
    rows: Sequence[Row] = ()
    """A table with the details, all rows with the same keys."""
    remedy: str = ""
    """What to do here, in place of the check's own words."""


def ok(seen: str, *, rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding that is well."""
    return Finding(Verdict.OK, seen, numbers, rows)


def warning(seen: str, *, remedy: str = "", rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding that costs speed or certainty."""
    return Finding(Verdict.WARNING, seen, numbers, rows, remedy)


def failure(seen: str, *, remedy: str = "", rows: Sequence[Row] = (), **numbers: Any) -> Finding:
    """Return a finding that is wrong."""
    return Finding(Verdict.FAILURE, seen, numbers, rows, remedy)


def skipped(why: str) -> Finding:
    """Return that there was nothing to look at."""
    return Finding(Verdict.SKIPPED, why)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """One thing to look at."""

    name: str
    """One to three words, in lower case."""
    symptom: str
    """What its fault looks like from outside."""
    remedy: str
    """What to do about it, where the finding knows nothing better."""
    look: Callable[[Subject], Finding]
    """Looks. What it raises is a finding too."""
    needs: Need = nothing
    """What there must be to look at; without it the check is skipped."""


class Result(NamedTuple):
    """A check that was made."""

    check: Check[Any]
    finding: Finding
    seconds: float
    """How long it took."""

    @property
    def remedy(self) -> str:
        """What to do; empty where there is nothing to do."""
        if self.finding.verdict in (Verdict.OK, Verdict.SKIPPED):
            return ""
        return self.finding.remedy or self.check.remedy

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        seen = {"check": self.check.name, "verdict": str(self.finding.verdict), "seen": self.finding.seen}
        details = {"numbers": dict(self.finding.numbers), "rows": [dict(row) for row in self.finding.rows]}
        return {**seen, "remedy": self.remedy, "seconds": round(self.seconds, 3), **details}


def check(
    name: str, *, symptom: str, remedy: str, needs: Need = nothing
) -> Callable[[Callable[[Subject], Finding]], Check[Subject]]:
    """Make a check of the function below."""
    return lambda look: Check(name, symptom, remedy, look, needs)


def make(check: Check[Subject], subject: Subject) -> Result:
    """Make a check. What it raises, of a driver or of a compiler, is a failure that names it.

    Raises:
        ConfigError: the question was wrong, not the answer.
    """
    start = time.perf_counter()
    try:
        missing = check.needs(subject)
        finding = skipped(missing) if missing else check.look(subject)
    except ConfigError:
        raise
    except Exception as error:
        finding = failure(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Result(check, finding, time.perf_counter() - start)
