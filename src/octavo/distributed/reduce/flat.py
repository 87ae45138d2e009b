"""Reductions over one group of ranks: summed by the backend, or by an all-to-all and a kernel that sums in FP32.

A sum computed along the way is rounded at every hop. In a `LocalSum` each contribution is rounded once, before it is
sent, and the errors average out with more ranks. The bytes are those of a reduce-scatter of the same width. The pattern
is that of ZeRO++ (arXiv 2306.10209, section 3.3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme, padded, part_length
from octavo.kernels.wire import add, pack


class FP32(Scheme):
    """FP32 on the wire, FP32 sums."""

    name = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        part = output if output.dtype == self.dtype else torch.empty_like(output, dtype=self.dtype)
        self.wire.reduce_scatter(part, input.to(self.dtype), group)
        torch.mul(part, factor, out=part)
        if part is not output:
            output.copy_(part)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        summed = gradient.to(self.dtype)
        self.wire.all_reduce(summed, group)
        gradient.copy_(summed.mul_(factor))


class PlainBF16(FP32):
    """BF16 on the wire, sums rounded to BF16 at each hop: PyTorch's behaviour with BF16 gradients."""

    name = "bf16-plain"
    dtype = torch.bfloat16


class LocalSum(Scheme):
    """Each rank sums its part, in the order of ranks; an all-reduce then gathers the encoded sums."""

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
    """E4M3 on the wire, one scale per 128 values, local to the sender; FP32 sums."""

    name = "fp8-block"

    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        return pack(x, messages, length)
