"""Reductions as PyTorch does them: the backend sums, in the dtype that travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme


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
    """BF16 on the wire, sums rounded to BF16 at most hops: what PyTorch does with BF16 gradients."""

    name = "bf16-plain"
    dtype = torch.bfloat16
