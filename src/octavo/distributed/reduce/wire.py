"""The collectives that reductions use, and the bytes that this rank sends by them.

Bytes are counted where a collective is called, by what its algorithm must send: in an all-to-all or a reduce-scatter
everything but a rank's own part, in an all-gather its own part to each other rank, in an all-reduce both (Patarasuk and
Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002, section 3). FP8 travels as bytes where only copies are made: gloo knows no
FP8.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in PyTorch 2.13, whose old names warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire:
    """Collectives on contiguous tensors, on the current stream."""

    def __init__(self) -> None:
        self.sent = 0
        """Bytes that this rank has sent to others."""

    def all_to_all(self, messages: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send row r of `messages` (ranks, width) to rank r; return what each rank sent here, (ranks, width)."""
        received = torch.empty_like(messages)
        dist.all_to_all_single(_bytes(received), _bytes(messages), group=group)
        self.sent += messages.nbytes * (group.size() - 1) // group.size()
        return received

    def all_gather(self, message: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the messages (width,) of all ranks, (ranks, width)."""
        gathered = message.new_empty(group.size(), message.numel())
        _all_gather(_bytes(gathered), _bytes(message), group=group)
        self.sent += message.nbytes * (group.size() - 1)
        return gathered

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Sum as the backend does it, in the dtype of the tensors; output (n,), input (ranks * n,)."""
        _reduce_scatter(output, input, group=group)
        self.sent += input.nbytes * (group.size() - 1) // group.size()

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum in place as the backend does it, in the dtype of the tensor."""
        dist.all_reduce(tensor, group=group)
        self.sent += 2 * tensor.nbytes * (group.size() - 1) // group.size()

    def maximum(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Make each element the largest of all ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        self.sent += 2 * tensor.nbytes * (group.size() - 1) // group.size()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
