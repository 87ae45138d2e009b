"""Collectives on streams: the tensors of each rank concatenated, and cut into pieces of equal size.

With a greedy assignment the streams are of about equal length, so that almost no padding is sent, whatever the sizes of
the tensors; the size of a piece bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme, Wire

Streams = Sequence[Sequence[Tensor]]
"""Tensors (n,) of each rank, with the same sizes on all ranks."""


def reduce_to_owners(streams: Streams, scheme: Scheme, group: dist.ProcessGroup, piece: int, name: str) -> None:
    """Replace this rank's stream by its mean over the ranks; other streams stay unchanged.

    Args:
        streams: all of one dtype: FP32, BF16 or FP16.
        scheme: gradient reduction.
        group: the ranks.
        piece: values per rank in one collective.
        name: name of this gradient for the scheme; the number of the piece is appended.
    """
    like = next(tensor for tensors in streams for tensor in tensors)
    for number, (start, length) in enumerate(_pieces(streams, piece)):
        sent = like.new_zeros(group.size(), length)
        for row, tensors in zip(sent, streams, strict=True):
            _copy(*_inside(row, tensors, start))
        mean = like.new_empty(length)
        scheme.reduce_scatter(mean, sent.view(-1), group, name=f"{name}.{number}")
        into, values = _inside(mean, streams[dist.get_rank(group)], start)
        _copy(values, into)


def gather_from_owners(streams: Streams, wire: Wire, group: dist.ProcessGroup, piece: int) -> None:
    """Replace every stream by that of its owner.

    Args:
        streams: uint8.
        wire: counts the bytes sent.
        group: the ranks.
        piece: bytes per rank in one collective.
    """
    rank = dist.get_rank(group)
    like = next(tensor for tensors in streams for tensor in tensors)
    for start, length in _pieces(streams, piece):
        mine = like.new_zeros(length)
        _copy(*_inside(mine, streams[rank], start))
        for other, row in enumerate(wire.all_gather(mine, group)):
            if other != rank:
                received, here = _inside(row, streams[other], start)
                _copy(here, received)


def _pieces(streams: Streams, piece: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each piece, up to the length of the longest stream."""
    longest = max(sum(tensor.numel() for tensor in tensors) for tensors in streams)
    return ((start, min(piece, longest - start)) for start in range(0, longest, piece))


def _inside(row: Tensor, tensors: Sequence[Tensor], start: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a piece split into parts, and the views of the concatenated tensors that correspond to them."""
    views, offset = [], -start
    for tensor in tensors:
        first, last = max(-offset, 0), min(row.numel() - offset, tensor.numel())
        if first < last:
            views.append(tensor[first:last])
        offset += tensor.numel()
    sizes = [view.numel() for view in views]
    return list(row[: sum(sizes)].split(sizes)), views


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
