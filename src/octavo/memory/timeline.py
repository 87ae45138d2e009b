"""What lies in memory at which moment: allocations with a birth, a death and a kind, and the highest sum of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["weights", "gradients", "states", "activations", "workspace"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""`weights`: parameters, buffers, and the codes that are kept of them. `states`: the optimizer's. `activations`: what
backward reads of forward, and the batch. `workspace`: what lives for a moment, gradients of activations included."""

GRAIN = 512
"""Bytes of which PyTorch's allocator for CUDA gives whole multiples: `max_memory_allocated` counts those."""
SEGMENT = 2 * 2**20
"""Bytes of which it asks the driver for whole multiples: `max_memory_reserved` counts those."""


@dataclass(slots=True, eq=False)
class Allocation:
    """Memory from one event to another. Events are counted from 0."""

    size: int
    """Bytes, a multiple of `GRAIN`."""
    born: int
    phase: str
    """What was going on: `outside` of a step, its `forward` or its `backward`."""
    died: int | None = None
    """None: it is still there."""
    kind: Kind | None = None
    """None: nobody has said it yet; see `Timeline.settle`."""
    is_parameter: bool = False

    def is_alive_at(self, event: int) -> bool:
        """Return whether it takes memory right after an event."""
        return self.born <= event and (self.died is None or self.died > event)


@dataclass(slots=True)
class Step:
    """When the parts of a training step begin, in events."""

    start: int
    backward: int
    update: int

    def kind_of(self, allocation: Allocation) -> Kind:
        """Return what an allocation of this step is that nobody has named."""
        if allocation.died is None:
            return "weights"  # codes of weights, scales that are kept: they stay from step to step
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
        """Enter memory of `size` bytes."""
        made = Allocation(-(-size // GRAIN) * GRAIN, self.now, phase)
        self.allocations.append(made)
        self.now += 1
        return made

    def free(self, allocation: Allocation) -> None:
        """Enter the end of an allocation."""
        if allocation.died is None:
            allocation.died = self.now
            self.now += 1

    def settle(self) -> None:
        """Give a kind to all that has none, by when it comes and goes."""
        for allocation in self.allocations:
            if allocation.kind is None:
                steps = [step for step in self.steps if step.start <= allocation.born]
                is_batch = allocation.phase == "outside" and any(allocation.is_alive_at(s.backward) for s in self.steps)
                allocation.kind = "activations" if is_batch else steps[-1].kind_of(allocation) if steps else "workspace"

    def peak(self, size_of: Callable[[Allocation], int] = lambda allocation: allocation.size, since: int = 0) -> int:
        """Return the event, `since` or a later one, right after which the most memory is taken.

        Args:
            size_of: the bytes that each allocation counts for.
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
        """Return what takes memory right after an event."""
        return [allocation for allocation in self.allocations if allocation.is_alive_at(event)]


def reserved(allocations: list[Allocation]) -> int:
    """Return what the allocator asks the driver for if nothing is ever cut badly: the least, not a forecast.

    Allocations up to 1 MiB share segments of 2 MiB, larger ones have whole multiples of that.
    """
    small = sum(a.size for a in allocations if a.size <= SEGMENT // 2)
    large = (a.size for a in allocations if a.size > SEGMENT // 2)
    return sum(-(-size // SEGMENT) * SEGMENT for size in (small, *large))
