"""How long a collective takes on paper: a latency for each hop, and bytes by the rate of the slowest link.

Hosts have several GPUs with a fast link between them, and each GPU has its own network card. A ring of all-gather or
reduce-scatter sends (p - 1) / p of the bytes through every rank; the cards of a host carry it together. So a group that
has k GPUs of each host runs at k cards' rate, but no faster than the fast link. An all-reduce is two rings, or a tree:
fewer hops, a few more bytes (Patarasuk and Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002; Sanders, Speck and Traeff, 2009,
doi 10.1016/j.parco.2009.09.001).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective."""

    hosts: int
    per_host: int
    """Of them on each host."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.hosts * self.per_host


@dataclass(frozen=True, slots=True)
class Links:
    """What connects GPUs, one direction of each: bytes a second, and seconds a hop."""

    inside: float
    """Between GPUs of one host."""
    outside: float
    """Of one GPU's card."""
    hop_inside: float
    hop_outside: float

    def rate(self, group: Group) -> float:
        """Return the bytes a second that flow through each rank."""
        return self.inside if group.hosts == 1 else min(group.per_host * self.outside, self.inside)

    def gather(self, size: float, group: Group) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, by a ring; `size`: bytes of the whole."""
        if group.ranks == 1 or not size:
            return 0.0
        hops = (group.hosts - 1) * self.hop_outside + group.hosts * (group.per_host - 1) * self.hop_inside
        return hops + bound(size, group.ranks, self.rate(group))

    def all_reduce(self, size: float, group: Group) -> float:
        """Return the seconds of an all-reduce, by two rings or by a tree of hosts, whichever is faster."""
        if group.ranks == 1 or not size:
            return 0.0
        up = ceil(log2(group.hosts)) * self.hop_outside + (group.per_host - 1) * self.hop_inside
        return min(2 * self.gather(size, group), 2 * (up + size / self.rate(group)))

    def send(self, size: float) -> float:
        """Return the seconds of a message from one host to another."""
        return self.hop_outside + size / self.outside


def bound(size: float, ranks: int, rate: float) -> float:
    """Return the seconds below which no all-gather of `size` bytes can be: every rank receives what it has not."""
    return (ranks - 1) / ranks * size / rate
