"""Timeline of allocations, each with a birth, a death and a kind, and the peak of their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["weights", "gradients", "states", "activations", "workspace"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""`weights`: parameters, buffers and codes of shards. `states`: the optimizer's. `activations`: tensors saved for
backward, and the batch. `workspace`: temporaries, including gradients of activations."""

GRAIN = 512
"""Granularity in bytes of PyTorch's CUDA allocator, as `max_memory_allocated` counts."""
SEGMENT = 2 * 2**20
"""Granularity in bytes of its requests to the driver, as `max_memory_reserved` counts."""


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory allocated between two events. Events are counted from 0."""

    size: int
    """Bytes, a multiple of `GRAIN`."""
    born: int
    phase: str
    """Phase of the birth: `outside` of a step, `forward` or `backward`."""
    died: int | None = None
    """None: still allocated."""
    kind: Kind | None = None
    """None: not known yet; see `Timeline.settle`."""
    is_parameter: bool = False

    def is_alive_at(self, event: int) -> bool:
        """Return whether the memory is allocated right after an event."""
        return self.born <= event and (self.died is None or self.died > event)


@dataclass(slots=True)
class Step:
    """Start of each part of a training step, as an event."""

    start: int
    backward: int
    update: int

    def kind_of(self, allocation: Allocation) -> Kind:
        """Return the kind of an allocation of this step, by its lifetime."""
        if allocation.died is None:
            return "weights"  # codes of shards and stored scales persist across steps
        if allocation.is_alive_at(self.update - 1):
            return "gradients"
        is_read = allocation.phase == "forward" and allocation.is_alive_at(self.backward)
        return "activations" if is_read else "workspace"


class Timeline:
    """All allocations of a program, in the order of their birth."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.steps: list[Step] = []
        self.now = 0
        """The next event."""

    def allocate(self, size: int, phase: str) -> Allocation:
        """Add an allocation of `size` bytes."""
        made = Allocation(-(-size // GRAIN) * GRAIN, self.now, phase)
        self.allocations.append(made)
        self.now += 1
        return made

    def free(self, allocation: Allocation) -> None:
        """End an allocation."""
        if allocation.died is None:
            allocation.died = self.now
            self.now += 1

    def settle(self) -> None:
        """Set the kind of every allocation that has none, by its lifetime."""
        for allocation in self.allocations:
            if allocation.kind is None:
                steps = [step for step in self.steps if step.start <= allocation.born]
                is_batch = allocation.phase == "outside" and any(allocation.is_alive_at(s.backward) for s in self.steps)
                allocation.kind = "activations" if is_batch else steps[-1].kind_of(allocation) if steps else "workspace"

    def peak(self, size_of: Callable[[Allocation], int] = lambda allocation: allocation.size, since: int = 0) -> int:
        """Return the event, `since` or later, right after which the most memory is allocated.

        Args:
            size_of: bytes that each allocation counts for.
        """
        moves: dict[int, int] = {}
        for allocation in self.allocations:
            if allocation.died is None or allocation.died > since:
                born = max(allocation.born, since)
                moves[born] = moves.get(born, 0) + size_of(allocation)
                if allocation.died is not None:
                    moves[allocation.died] = moves.get(allocation.died, 0) - size_of(allocation)
        total, best, where = 0, 0, since
        for event in sorted(moves):
            total += moves[event]
            if total > best:
                best, where = total, event
        return where

    def alive_at(self, event: int) -> list[Allocation]:
        """Return the allocations that exist right after an event."""
        return [allocation for allocation in self.allocations if allocation.is_alive_at(event)]


def reserved(allocations: list[Allocation]) -> int:
    """Return the bytes that the allocator reserves without any fragmentation: a lower bound, not a forecast.

    Allocations up to 1 MiB share segments of 2 MiB, larger ones have whole multiples of that.
    """
    small = sum(a.size for a in allocations if a.size <= SEGMENT // 2)
    large = (a.size for a in allocations if a.size > SEGMENT // 2)
    return sum(-(-size // SEGMENT) * SEGMENT for size in (small, *large))
