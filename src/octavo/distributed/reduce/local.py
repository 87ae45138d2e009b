"""Reductions whose sums are made where they are needed: an all-to-all, then one kernel that adds up in FP32.

A sum that travels is rounded at every hop. Here each contribution is rounded once, before it is sent, and their errors
average out: the more ranks, the better. The bytes are those of a reduce-scatter of the same width. The pattern is that
of ZeRO++ (arXiv 2306.10209, section 3.3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme, padded, part_length
from octavo.kernels.wire import add, pack


class LocalSum(Scheme):
    """Each rank sums its part, in the order of ranks; an all-reduce then gathers the sums as they travel."""

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        length = output.numel()
        received = self.wire.all_to_all(self._encode(input, group.size(), length), group)
        add(received[None], length, output, factor)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        length = part_length(gradient.numel(), group.size())
        received = self.wire.all_to_all(self._encode(gradient, group.size(), length), group)
        mine = gradient.new_empty(length, dtype=torch.float32)
        add(received[None], length, mine, factor)
        gathered = self.wire.all_gather(self._encode(mine, 1, length)[0], group)
        add(gathered[:, None], length, gradient)

    @abstractmethod
    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        """Return x as messages of `length` values, (messages, width), as `kernels.wire.add` reads them."""


class BF16(LocalSum):
    """BF16 on the wire, FP32 sums."""

    name = "bf16"

    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        return padded(x, messages * length, torch.bfloat16).view(messages, length)


class FP8Block(LocalSum):
    """E4M3 with a scale for each 128 values on the wire, FP32 sums. Scales are local to the rank that sends."""

    name = "fp8-block"

    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        return pack(x, messages, length)
