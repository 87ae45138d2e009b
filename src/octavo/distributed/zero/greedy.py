"""Assignment of whole tensors to ranks: FP8-LM's Algorithm 1 (arXiv 2310.18313, section 2.3).

A tensor with one scale cannot be sharded unless all shards agree on the scale. So each is assigned to one rank, with
its scale: the largest first, to the rank with the smallest load. The largest load is at most 4/3 - 1/(3 ranks) times
the optimum (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969, doi 10.1137/0117039, theorem 2). A tensor
larger than a rank's share stays a bottleneck: see `Assignment.imbalance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of tensors to ranks. `print(assignment)` shows the load of each rank."""

    owners: tuple[int, ...]
    """Rank of each tensor."""
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    ranks: int

    @property
    def loads(self) -> tuple[int, ...]:
        """Bytes per rank."""
        loads = [0] * self.ranks
        for owner, size in zip(self.owners, self.sizes, strict=True):
            loads[owner] += size
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Largest load divided by the mean: 1 is even. 1 also where there are no bytes."""
        return max(self.loads) * self.ranks / sum(self.loads) if sum(self.loads) else 1.0

    def of(self, rank: int) -> list[int]:
        """Return the tensors of a rank, in their order."""
        return [tensor for tensor, owner in enumerate(self.owners) if owner == rank]

    def with_more(self, sizes: Sequence[int]) -> Assignment:
        """Return this assignment extended by further tensors, assigned in the same way to the least loaded ranks.

        Raises:
            ConfigError: there are no ranks, or a size is negative.
        """
        if self.ranks < 1:
            raise ConfigError(f"an assignment over {self.ranks} ranks: at least one is needed.")
        if any(size < 0 for size in sizes):
            raise ConfigError("an assignment: the size of a tensor cannot be negative.")
        loads, owners = list(self.loads), [0] * len(sizes)
        for tensor in sorted(range(len(sizes)), key=lambda tensor: -sizes[tensor]):
            least = min(range(self.ranks), key=loads.__getitem__)
            owners[tensor] = least
            loads[least] += sizes[tensor]
        return Assignment((*self.owners, *owners), (*self.sizes, *sizes), self.ranks)

    def __str__(self) -> str:
        lines = [f"{'rank':<6}{'tensors':>8}{'MB':>12}"]
        lines += [f"{rank:<6}{len(self.of(rank)):>8}{load / 1e6:>12.3f}" for rank, load in enumerate(self.loads)]
        return "\n".join([*lines, f"the largest has {self.imbalance:.3f} times the mean"])


def greedy_assignment(sizes: Sequence[int], ranks: int) -> Assignment:
    """Assign tensors of these sizes, the largest first, each to the least loaded rank: Algorithm 1.

    Ties are broken by order, so that all ranks compute the same assignment.

    Raises:
        ConfigError: there are no ranks, or a size is negative.
    """
    return Assignment((), (), ranks).with_more(sizes)
