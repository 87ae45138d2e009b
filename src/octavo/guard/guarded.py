"""What guardrails need of a run, and what they tell it. `octavo train` and `octavo.guard.Loop` are such runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from octavo.guard.diagnosis import Probe
from octavo.guard.watch import Row
from octavo.recipes import Recipe


class Note(NamedTuple):
    """Something that guardrails saw, decided or did: an event of a run, with its cause."""

    step: int
    level: str
    """`info`, `warning` or `error`."""
    rule: str
    """The rule of the alarm, or `guard`."""
    text: str
    """For people."""
    action: str = ""
    """What was done; empty for nothing."""
    layer: str = ""
    role: str = ""
    value: float | None = None
    limit: float | None = None
    cause: str = ""
    """One of `octavo.guard.diagnosis.Cause`, where it is known."""


class Guarded(Protocol):
    """A run as guardrails see it."""

    @property
    def done(self) -> int:
        """Steps made."""
        ...

    @property
    def rows(self) -> Sequence[Row]:
        """What the rows of `Observation.values` are about now."""
        ...

    def take(self) -> Any:
        """Return a copy of all that a step changes, the position in the data too."""
        ...

    def restore(self, taken: Any) -> None:
        """Go back to what `take` returned; it stays as it is."""
        ...

    def probe(self, *, fp8: bool, earlier: Any = None, backward: bool = True) -> Probe:
        """Try the next batch, or the one after the snapshot `earlier`; nothing changes by it."""
        ...

    def skip(self) -> None:
        """Pass over the next batch."""
        ...

    def refine(self, recipe: Recipe) -> str:
        """Compute by another recipe from here on; return why that is not possible, empty where it is done."""
        ...

    def locate(self) -> str:
        """Say which layer, role and token of the next batch is not finite first; empty for none."""
        ...

    def damage(self, layer: str, taken: Any, reach: float) -> str:
        """Say what of a layer's weight changed by more than `reach` since a snapshot; empty for nothing."""
        ...

    def note(self, note: Note) -> None:
        """Tell those who watch."""
        ...
