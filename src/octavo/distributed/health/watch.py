"""Which rank is gone, or hangs, judged by what all ranks say of themselves.

A rank that is silent is gone. Where no rank gets any further, the one that has begun the fewest collectives is the one
that the others wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BEAT = 0.5
"""Seconds between two reports of a rank."""
PATIENCE = 3.0
"""Seconds without a report after which a rank is gone, once something has failed."""


UNHURRIED = -1
"""In place of a step: no rank is expected to get any further."""


class Report(NamedTuple):
    """What a rank says of itself."""

    beat: int
    """How many reports it has made."""
    step: int
    """In progress, counted from 1; 0 before the first; `UNHURRIED` while this rank may take any time."""
    collectives: int
    """Begun so far."""
    left: bool
    """Whether it has no more to do."""


NOTHING = Report(0, 0, 0, False)
"""Of a rank that has not begun."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The last report of a rank, and since when it is what it is, in seconds."""

    report: Report
    heard: float
    """Since when it has made no other."""
    moved: float
    """Since when it is at the same step and collective."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the ranks stop."""

    text: str
    blamed: tuple[int, ...] = ()
    """Those that the others cannot go on without."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """The reports of all ranks over time. All times are seconds by one clock of this rank."""

    ranks: int
    timeout: float
    """Seconds without a report of a rank, or without progress of any."""
    beat: float = BEAT
    seen: dict[int, Seen] = field(default_factory=dict)
    alarm: float | None = None
    """When something failed here: a collective, or this process was told to end."""
    updated: float | None = None

    @property
    def patience(self) -> float:
        """Seconds in which a rank that lives is heard."""
        return max(PATIENCE, 6 * self.beat)

    @property
    def is_sure(self) -> bool:
        """Whether it is known of all ranks that they have lived after the alarm."""
        assert self.updated is not None
        return self.alarm is not None and self.updated - self.alarm > self.patience + 2 * self.beat

    def update(self, reports: Mapping[int, Report], now: float) -> None:
        """Take in the last reports of those ranks that have made one."""
        # A process that was stopped itself has heard nobody meanwhile.
        slept = self.updated is not None and now - self.updated > self.patience / 2
        self.updated = now
        for rank in range(self.ranks):
            report, known = reports.get(rank, NOTHING), self.seen.get(rank)
            if known is None or slept:
                self.seen[rank] = Seen(report, now, now)
                continue
            heard = now if report.beat != known.report.beat else known.heard
            moved = now if report[1:] != known.report[1:] else known.moved
            self.seen[rank] = Seen(report, heard, moved)

    def verdict(self) -> Verdict | None:
        """Return why the ranks must stop, or None."""
        now = self.updated
        here = {rank: seen for rank, seen in self.seen.items() if not seen.report.left}
        if now is None or not here:
            return None
        stands = all(seen.report.step != UNHURRIED and now - seen.moved > self.timeout for seen in here.values())
        limit = min(self.patience, self.timeout) if stands or self.alarm is not None else self.timeout
        silent = {rank: seen for rank, seen in here.items() if now - seen.heard > limit}
        if silent:
            return self._blame(silent, "is gone: nothing was heard of it", lambda seen: now - seen.heard)
        return self._hang(here, now) if stands else None

    def _hang(self, here: Mapping[int, Seen], now: float) -> Verdict:
        least = min(seen.report.collectives for seen in here.values())
        behind = {rank: seen for rank, seen in here.items() if seen.report.collectives == least}
        if len(behind) < len(here):
            what = "is missing: it has not come to a collective in which the others wait"
            return self._blame(behind, what, lambda seen: now - seen.moved)
        return Verdict(
            f"all ranks stand still {at(min(seen.report.step for seen in here.values()))}, for {self.timeout:g} s, and"
            " none is behind the others: the network or the storage is stuck, or a step takes longer than the timeout."
        )

    def _blame(self, ranks: Mapping[int, Seen], what: str, since: Callable[[Seen], float]) -> Verdict:
        parts = [
            f"rank {rank} of {self.ranks} {what}, for {since(seen):.0f} s, {at(seen.report.step)}"
            for rank, seen in ranks.items()
        ]
        return Verdict("; ".join(parts) + ".", tuple(ranks))


def at(step: int) -> str:
    """Return where a rank is, in words."""
    return f"at step {step}" if step > 0 else "before the first step"
