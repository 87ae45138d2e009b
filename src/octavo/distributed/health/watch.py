"""Diagnosis of dead or hung ranks, from the reports of all ranks.

A silent rank is dead. If no rank makes progress, the others are waiting for the one that has begun the fewest
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BEAT = 0.5
"""Seconds between two reports of a rank."""
PATIENCE = 3.0
"""Seconds without a report after which a rank counts as dead, once something has failed."""
UNHURRIED = -1
"""Step number during which no progress is expected."""


class Report(NamedTuple):
    """Progress report of a rank."""

    beat: int
    """Number of reports so far."""
    step: int
    """Step in progress, counted from 1; 0 before the first; `UNHURRIED` while this rank may take any time."""
    collectives: int
    """Number of collectives begun so far."""
    left: bool
    """Whether the rank has finished."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Last report of a rank, with times in seconds."""

    report: Report
    heard: float
    """Time of the last report."""
    moved: float
    """Time of the last progress in steps or collectives."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Reason why the ranks stop."""

    text: str
    blamed: tuple[int, ...] = ()
    """Ranks that the others wait for."""


@dataclass(slots=True, kw_only=True)
class RankMonitor:
    """Reports of all ranks over time. All times are seconds on the clock of this rank."""

    ranks: int
    timeout: float
    """Seconds without a report of a rank, or without progress of any."""
    beat: float = BEAT
    seen: dict[int, RankState] = field(default_factory=dict)
    alarm: float | None = None
    """Time of a failure on this rank: of a collective, or SIGTERM."""
    updated: float | None = None

    @property
    def patience(self) -> float:
        """Seconds within which a live rank reports."""
        return max(PATIENCE, 6 * self.beat)

    @property
    def is_sure(self) -> bool:
        """Whether all ranks are known to have been alive after the alarm."""
        assert self.updated is not None
        return self.alarm is not None and self.updated - self.alarm > self.patience + 2 * self.beat

    def update(self, reports: Mapping[int, Report], now: float) -> None:
        """Update the state of all ranks from their last reports."""
        # After a pause of this process itself, times without reports mean nothing.
        slept = self.updated is not None and now - self.updated > self.patience / 2
        self.updated = now
        for rank in range(self.ranks):
            report, known = reports.get(rank, Report(0, 0, 0, left=False)), self.seen.get(rank)
            if known is None or slept:
                self.seen[rank] = RankState(report, now, now)
                continue
            heard = now if report.beat != known.report.beat else known.heard
            moved = now if report[1:] != known.report[1:] else known.moved
            self.seen[rank] = RankState(report, heard, moved)

    def diagnose(self) -> RankFailure | None:
        """Return why the ranks must stop, or None."""
        now = self.updated
        here = {rank: seen for rank, seen in self.seen.items() if not seen.report.left}
        if now is None or not here:
            return None
        stands = all(seen.report.step != UNHURRIED and now - seen.moved > self.timeout for seen in here.values())
        limit = min(self.patience, self.timeout) if stands or self.alarm is not None else self.timeout
        silent = {rank: seen for rank, seen in here.items() if now - seen.heard > limit}
        if silent:
            return self._blame(silent, "is gone: no report", lambda seen: now - seen.heard)
        return self._hang(here, now) if stands else None

    def _hang(self, here: Mapping[int, RankState], now: float) -> RankFailure:
        least = min(seen.report.collectives for seen in here.values())
        behind = {rank: seen for rank, seen in here.items() if seen.report.collectives == least}
        if len(behind) < len(here):
            what = "is missing: it has not entered a collective in which the others wait"
            return self._blame(behind, what, lambda seen: now - seen.moved)
        return RankFailure(
            f"no rank has made progress {at(min(seen.report.step for seen in here.values()))}, for {self.timeout:g} s,"
            " and none is behind the others: network or storage is stuck, or a step takes longer than the timeout."
        )

    def _blame(self, ranks: Mapping[int, RankState], what: str, since: Callable[[RankState], float]) -> RankFailure:
        parts = [
            f"rank {rank} of {self.ranks} {what}, for {since(seen):.0f} s, {at(seen.report.step)}"
            for rank, seen in ranks.items()
        ]
        return RankFailure("; ".join(parts) + ".", tuple(ranks))


def at(step: int) -> str:
    """Return a step as text."""
    return f"at step {step}" if step > 0 else "before the first step"
