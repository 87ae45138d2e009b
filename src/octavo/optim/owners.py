"""Matrices of which each rank has a part: each is made whole on one rank, worked on there, and sent back.

    rows (B, r, C) of B matrices on each of n ranks   ->   B / n whole matrices (R, C) on each   ->   rows again

Matrix b belongs to rank b // (B / n). Two all-to-alls move every value once there and once back; no rank has all
matrices, and none is worked on twice. The pattern is that of distributed Muon (arXiv 2502.16982, section 2.3). Columns
go as rows of the transposed matrix do. What is cut over several dimensions of a mesh is made whole over one after
another, beginning with the finest parts.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.tensor import is_distributed


class Cut(NamedTuple):
    """How matrices lie on the ranks of a group: the same number of rows on each, and what is left on the last ones."""

    group: dist.ProcessGroup
    size: int
    """Rows, or columns, that the ranks have together."""
    axis: int = 0
    """0: cut by rows; 1: by columns, as many on each."""

    @property
    def ranks(self) -> int:
        """Of the group."""
        return dist.get_world_size(self.group)

    @property
    def each(self) -> int:
        """Rows, or columns, on a rank, those of the last ones filled up."""
        return -(-self.size // self.ranks)


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """Return how a matrix lies on ranks, the finest parts first; nothing where this rank has all of it.

    Raises:
        UnsupportedError: its rows are cut twice, or its columns, and not evenly.
    """
    if not is_distributed(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    # FSDP2 cuts what tensor parallel has left on a rank, and says so by shards with a stride.
    dims.sort(key=lambda dim: (getattr(placements[dim], "split_factor", 1) == 1, -dim))
    cuts: list[Cut] = []
    for number, dim in enumerate(dims):
        axis = placements[dim].dim
        coarser = prod(mesh.size(other) for other in dims[number + 1 :] if placements[other].dim == axis)
        size, uneven = divmod(parameter.shape[axis], coarser)
        cuts.append(Cut(mesh.get_group(dim), size, axis))
        if uneven or ((coarser > 1 or axis == 1) and size % mesh.size(dim)):
            raise UnsupportedError(
                f"a matrix {tuple(parameter.shape)} placed as {tuple(map(str, placements))} is not cut evenly: only "
                "rows that are cut once need not be."
            )
    return tuple(cuts)


def to_whole(parts: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
    """Return the whole matrices that are this rank's, from its parts of all: `to_owners`, over each of the cuts."""
    for how in cuts:
        parts = to_owners(parts, how)
    return parts


def to_parts(whole: Tensor, cuts: tuple[Cut, ...], count: int) -> Tensor:
    """Return this rank's parts of all `count` matrices: undo `to_whole`."""
    if not cuts:
        return whole
    return from_owners(to_parts(whole, cuts[1:], -(-count // cuts[0].ranks)), cuts[0], count)


def to_owners(parts: Tensor, how: Cut) -> Tensor:
    """Return the whole matrices (ceil(B / n), R, C) that are this rank's; the last ranks' can be zeros, of none.

    Args:
        parts: (B, how.each, C), rows of this rank of each matrix, contiguous; all ranks have the same B. Or columns,
            (B, R, how.each).
    """
    if how.axis == 1:
        return to_owners(parts.mT, how._replace(axis=0)).mT.contiguous()
    count, each, cols = parts.shape
    mine = -(-count // how.ranks)
    send = parts.new_zeros(how.ranks * mine, each, cols)
    send[:count] = parts
    received = _swap(send, how).view(how.ranks, mine, each, cols)
    return received.transpose(0, 1).reshape(mine, how.ranks * each, cols)[:, : how.size].contiguous()


def from_owners(whole: Tensor, how: Cut, count: int) -> Tensor:
    """Return what this rank has of all matrices, (count, how.each, C) or (count, R, how.each): undo `to_owners`."""
    if how.axis == 1:
        return from_owners(whole.mT, how._replace(axis=0), count).mT.contiguous()
    mine, height, cols = whole.shape
    full = whole.new_zeros(mine, how.ranks * how.each, cols)
    full[:, :height] = whole
    send = full.view(mine, how.ranks, how.each, cols).transpose(0, 1).contiguous()
    return _swap(send, how).view(how.ranks * mine, how.each, cols)[:count]


def _swap(messages: Tensor, how: Cut) -> Tensor:
    """Send the r-th part of the first dimension to rank r, and return what each rank sent; bytes, which gloo knows."""
    received = torch.empty_like(messages)
    dist.all_to_all_single(received.view(-1).view(torch.uint8), messages.view(-1).view(torch.uint8), group=how.group)
    return received
