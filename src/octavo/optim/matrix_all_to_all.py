"""All-to-all redistribution of sharded matrices: each is gathered on one rank, processed there, and scattered again.

    rows (B, r, C) of B matrices on each of n ranks   ->   B / n whole matrices (R, C) on each   ->   rows again

Matrix b is gathered on rank b // (B / n). Two all-to-alls move every value once there and once back; no rank has all
matrices, and none is processed twice. The pattern is that of distributed Muon (arXiv 2502.16982, section 2.3).
Column shards are handled as rows of the transposed matrix. Matrices sharded over several mesh dimensions are gathered
over one after another, beginning with the finest shards.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.tensor import is_distributed


class ShardLayout(NamedTuple):
    """Sharding of matrices over one group of ranks: equal parts, and the remainder on the last ranks."""

    group: dist.ProcessGroup
    size: int
    """Rows, or columns, over all ranks."""
    axis: int = 0
    """0: sharded by rows; 1: by columns, evenly."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def each(self) -> int:
        """Rows, or columns, per rank, padding of the last ranks included."""
        return -(-self.size // self.ranks)


def shard_layouts(parameter: Tensor) -> tuple[ShardLayout, ...]:
    """Return the sharding of a matrix, the finest shards first; empty where this rank has all of it.

    Raises:
        UnsupportedError: columns, or rows sharded twice, are not sharded evenly.
    """
    if not is_distributed(parameter):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    # FSDP2 shards the tensor-parallel part of a rank, which it marks by strided shards.
    dims.sort(key=lambda dim: (getattr(placements[dim], "split_factor", 1) == 1, -dim))
    layouts: list[ShardLayout] = []
    for number, dim in enumerate(dims):
        axis = placements[dim].dim
        coarser = prod(mesh.size(other) for other in dims[number + 1 :] if placements[other].dim == axis)
        size, uneven = divmod(parameter.shape[axis], coarser)
        layouts.append(ShardLayout(mesh.get_group(dim), size, axis))
        if uneven or ((coarser > 1 or axis == 1) and size % mesh.size(dim)):
            raise UnsupportedError(
                f"a matrix {tuple(parameter.shape)} placed as {tuple(map(str, placements))} is not sharded evenly: "
                "only rows that are sharded once need not be."
            )
    return tuple(layouts)


def gather_full(parts: Tensor, layouts: tuple[ShardLayout, ...]) -> Tensor:
    """Return the whole matrices of this rank, from its shards of all matrices: `gather_over` each layout."""
    for layout in layouts:
        parts = gather_over(parts, layout)
    return parts


def scatter_full(whole: Tensor, layouts: tuple[ShardLayout, ...], count: int) -> Tensor:
    """Return this rank's shards of all `count` matrices: the inverse of `gather_full`."""
    if not layouts:
        return whole
    return scatter_over(scatter_full(whole, layouts[1:], -(-count // layouts[0].ranks)), layouts[0], count)


def gather_over(parts: Tensor, layout: ShardLayout) -> Tensor:
    """Return the whole matrices (ceil(B / n), R, C) of this rank; those of the last ranks may be zero padding.

    Args:
        parts: this rank's rows of each matrix, (B, layout.each, C), contiguous, with the same B on all ranks; or its
            columns, (B, R, layout.each).
    """
    if layout.axis == 1:
        return gather_over(parts.mT, layout._replace(axis=0)).mT.contiguous()
    count, each, cols = parts.shape
    mine = -(-count // layout.ranks)
    send = parts.new_zeros(layout.ranks * mine, each, cols)
    send[:count] = parts
    received = _swap(send, layout).view(layout.ranks, mine, each, cols)
    return received.transpose(0, 1).reshape(mine, layout.ranks * each, cols)[:, : layout.size].contiguous()


def scatter_over(whole: Tensor, layout: ShardLayout, count: int) -> Tensor:
    """Return this rank's shards, (count, layout.each, C) or (count, R, layout.each): the inverse of `gather_over`."""
    if layout.axis == 1:
        return scatter_over(whole.mT, layout._replace(axis=0), count).mT.contiguous()
    mine, height, cols = whole.shape
    full = whole.new_zeros(mine, layout.ranks * layout.each, cols)
    full[:, :height] = whole
    send = full.view(mine, layout.ranks, layout.each, cols).transpose(0, 1).contiguous()
    return _swap(send, layout).view(layout.ranks * mine, layout.each, cols)[:count]


def _swap(messages: Tensor, layout: ShardLayout) -> Tensor:
    """Send the r-th part of the first dimension to rank r, and return what each rank sent; as bytes, for gloo."""
    received = torch.empty_like(messages)
    dist.all_to_all_single(received.view(-1).view(torch.uint8), messages.view(-1).view(torch.uint8), group=layout.group)
    return received
