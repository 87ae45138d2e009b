"""Matrices of which each rank has rows: each is made whole on one rank, worked on there, and sent back.

    rows (B, r, C) of B matrices on each of n ranks   ->   B / n whole matrices (R, C) on each   ->   rows again

Matrix b belongs to rank b // (B / n). Two all-to-alls move every value once there and once back; no rank has all
matrices, and none is worked on twice. The pattern is that of distributed Muon (arXiv 2502.16982, section 2.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.tensor import is_distributed


class Rows(NamedTuple):
    """How matrices lie on the ranks of a group: the same number of rows on each, and what is left on the last ones."""

    group: dist.ProcessGroup
    height: int
    """Rows of a whole matrix."""

    @property
    def ranks(self) -> int:
        """Of the group."""
        return dist.get_world_size(self.group)

    @property
    def each(self) -> int:
        """Rows on a rank, those of the last ones filled up."""
        return -(-self.height // self.ranks)


def rows_of(parameter: Tensor) -> Rows | None:
    """Return how a matrix lies on ranks, None where this rank has all of it.

    Raises:
        UnsupportedError: it is cut by columns, or in two ways.
    """
    if not is_distributed(parameter):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return None
    if len(cut) > 1 or not placements[cut[0]].is_shard(0):
        raise UnsupportedError(f"a matrix placed as {tuple(map(str, placements))} is not cut by rows alone.")
    return Rows(mesh.get_group(cut[0]), parameter.shape[0])


def to_owners(parts: Tensor, how: Rows) -> Tensor:
    """Return the whole matrices (ceil(B / n), R, C) that are this rank's; the last ranks' can be zeros, of none.

    Args:
        parts: (B, how.each, C), rows of this rank of each matrix, contiguous; all ranks have the same B.
    """
    count, each, cols = parts.shape
    mine = -(-count // how.ranks)
    send = parts.new_zeros(how.ranks * mine, each, cols)
    send[:count] = parts
    received = _swap(send, how).view(how.ranks, mine, each, cols)
    return received.transpose(0, 1).reshape(mine, how.ranks * each, cols)[:, : how.height].contiguous()


def from_owners(whole: Tensor, how: Rows, count: int) -> Tensor:
    """Return rows of this rank (count, how.each, C) of all matrices, from those that are whole on each rank."""
    mine, height, cols = whole.shape
    full = whole.new_zeros(mine, how.ranks * how.each, cols)
    full[:, :height] = whole
    send = full.view(mine, how.ranks, how.each, cols).transpose(0, 1).contiguous()
    return _swap(send, how).view(how.ranks * mine, how.each, cols)[:count]


def _swap(messages: Tensor, how: Rows) -> Tensor:
    """Send the r-th part of the first dimension to rank r, and return what each rank sent; bytes, which gloo knows."""
    received = torch.empty_like(messages)
    dist.all_to_all_single(received.view(-1).view(torch.uint8), messages.view(-1).view(torch.uint8), group=how.group)
    return received
