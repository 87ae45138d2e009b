"""Tensors of several ranks laid end to end, a stream for each rank, and cut into pieces of one size for collectives.

Where streams are about as long as each other, as a greedy assignment makes them, next to nothing is sent as padding,
whatever the sizes of the tensors; and a piece bounds the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme
from octavo.distributed.reduce.wire import Wire

Streams = Sequence[Sequence[Tensor]]
"""Of each rank, tensors (n,), the same sizes on all ranks."""


def reduce_to_owners(streams: Streams, scheme: Scheme, group: dist.ProcessGroup, piece: int, name: str) -> None:
    """Replace the values of this rank's stream by their mean over the ranks; other streams stay as they are.

    Args:
        streams: all of one dtype: FP32, BF16 or FP16.
        scheme: how gradients are reduced.
        group: the ranks.
        piece: values that a collective carries for each rank.
        name: of this gradient for the scheme; the number of the piece follows it.
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
    """Replace the bytes of every stream by those that its rank has.

    Args:
        streams: uint8.
        wire: what counts the bytes sent.
        group: the ranks.
        piece: bytes that each rank sends at a time.
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
    """Yield where each piece starts, and its length: that of the longest stream."""
    longest = max(sum(tensor.numel() for tensor in tensors) for tensors in streams)
    return ((start, min(piece, longest - start)) for start in range(0, longest, piece))


def _inside(row: Tensor, tensors: Sequence[Tensor], start: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a piece in parts, and views of what of the tensors, laid end to end, lies in each."""
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
