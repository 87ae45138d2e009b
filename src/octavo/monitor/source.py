"""What measures the tensors of a model, as far as a run store needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
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

    def step(self) -> None:
        """Close a step that no step of an optimizer has closed."""
        ...

    def snapshot(self) -> Snapshot | None:
        """Return a step whose measurements have arrived, with them; None where none is new. Never waits.

        Histograms of the step, where there are any, are then in `histograms`, as `Telemetry` has it.
        """
        ...

    def wait(self) -> None:
        """Wait until everything that was measured has arrived."""
        ...

    def restart(self, done: int) -> None:
        """Go on after step `done`, and drop what waits: the run was taken back."""
        ...

    def detach(self) -> None:
        """Stop measuring."""
        ...


def telemetry_of(
    model: nn.Module, every: int = 1, histograms_every: int = 0, *, together: bool = False, order: Sequence[str] = ()
) -> Source | None:
    """Return the telemetry of a model's FP8 layers, None where it has none; arguments are those of `Telemetry`.

    Args:
        together: with the other ranks, all of which call this: values are those of all, and equal on all.
        order: names of the layers of the whole model, where ranks have different ones.
    """
    from octavo.nn.telemetry import Telemetry

    group = dist.new_group() if together else None
    source = Telemetry(model, every, histograms_every=histograms_every, group=group, order=order)
    return source if source.rows else None


def arrived(source: Source | None) -> Iterator[Snapshot]:
    """Yield what has arrived since the last time."""
    while source is not None and (taken := source.snapshot()) is not None:
        yield taken


def histograms_of(source: Source | None) -> NDArray[np.float32] | None:
    """Return the histograms of the snapshot that came last; None where it has none."""
    return getattr(source, "histograms", None)
