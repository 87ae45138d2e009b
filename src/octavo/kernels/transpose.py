"""The byte transpose: FP8 codes (R, C) to (C, R). What a backward GEMM reads is what fprop read, moved."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.operator import define


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose (C, R), contiguous, of contiguous codes (R, C) of any one-byte dtype."""
    result: Tensor = torch.ops.octavo.transpose(codes)
    return result


def _transpose(codes: Tensor) -> Tensor:
    if codes.numel() and uses_triton(codes, "transpose"):
        from octavo.kernels.triton.transpose import transpose as fast

        with launches_on(codes.device):
            return fast(codes)
    return codes.t().contiguous()


def _transpose_shape(codes: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


define("transpose(Tensor codes) -> Tensor", _transpose, _transpose_shape)
