"""One rank of many without the others: a process group whose other ranks mirror this one.

Collectives copy in place of network transfers, so that a rank does all of its own work. Unlike those of PyTorch's
backend `fake`, results are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "alone"
"""Name for `init_process_group`."""
DEVICES = ["cpu", "cuda"]
"""Devices it runs on."""


def join_alone(ranks: int) -> None:
    """Join as rank 0 of `ranks`, without the others; call it in place of `init_process_group`."""
    if BACKEND.upper() not in dist.Backend.__dict__:

        def make(store: Any, rank: int, ranks: int, timeout: Any) -> LoopbackProcessGroup:
            return LoopbackProcessGroup(rank, ranks)

        dist.Backend.register_backend(BACKEND, make, devices=DEVICES)
    dist.init_process_group(BACKEND, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=ranks)


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have other names and types in each version


class LoopbackProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives of a rank whose peers hold the same data, on the current stream. Method names are PyTorch's.

    A sum is thus the value times the number of ranks, a mean or a maximum the value itself. Messages between the stages
    of a pipeline are not supported.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._rank, self._ranks = rank, ranks

    def getBackendName(self) -> str:
        """Return its name."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name registered in PyTorch."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return at once: there are no others."""
        return _done()

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Leave the tensors unchanged: all ranks have the same."""
        return _done(tensors)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Multiply a sum by the number of ranks; leave a mean or a maximum unchanged."""
        for tensor in tensors:
            tensor.mul_(self._factor(opts))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy each input once per rank."""
        for received, sent in zip(outputs, inputs, strict=True):
            for tensor in received:
                tensor.copy_(sent)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Fill the output with copies of the input."""
        output.view(self._ranks, -1).copy_(input.reshape(1, -1).expand(self._ranks, -1))
        return _done(output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather each pair."""
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Copy this rank's part of the input, times the number of ranks for a sum."""
        torch.mul(input.view(self._ranks, -1)[self._rank], self._factor(opts), out=output.view(-1))
        return _done(output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter each pair."""
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Receive from each rank what this one sends to itself, repeated to the expected size."""
        own = input.split(list(input_sizes) or len(input) // self._ranks)[self._rank]
        if not output_sizes:
            self.all_gather_single(output, own)
        elif len(own):
            rows = torch.cat([torch.arange(size) for size in output_sizes]).remainder(len(own))
            torch.index_select(own, 0, rows.to(own.device), out=output)
        else:
            output.zero_()
        return _done(output)

    # Names before PyTorch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _factor(self, opts: Any) -> int:
        """Return the factor of a reduction."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._ranks if operation == dist.ReduceOp.SUM else 1


def _done(result: Any = None) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work
