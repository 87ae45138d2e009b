"""What measures the tensors of a model, as far as a run store needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

Snapshot = tuple[int, NDArray[np.float32]]
"""A step, and float32 (tensors, statistics) of it."""


class Source(Protocol):
    """`octavo.nn.telemetry.Telemetry`, or whatever measures as it does."""

    done: int
    """Steps made; the next one measured is one more."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """What the rows of a snapshot are about: layer, role, operand, and the shape where it is fixed."""
        ...

    def snapshot(self) -> Snapshot | None:
        """Return a step whose measurements have arrived, with them; None where none is new. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until everything that was measured has arrived."""
        ...

    def detach(self) -> None:
        """Stop measuring."""
        ...


def telemetry_of(model: nn.Module, every: int = 1) -> Source | None:
    """Return the telemetry of a model's FP8 layers at each step that `every` divides; None where it has none."""
    from octavo.nn.telemetry import Telemetry

    source = Telemetry(model, every)
    return source if source.rows else None


def arrived(source: Source | None) -> Iterator[Snapshot]:
    """Yield what has arrived since the last time."""
    while source is not None and (taken := source.snapshot()) is not None:
        yield taken
