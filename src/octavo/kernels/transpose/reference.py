"""Reference byte transpose."""

from __future__ import annotations

import torch
from torch import Tensor


def transpose(codes: Tensor, after: Tensor | None) -> Tensor:
    """See `octavo.kernels.transpose.transpose`."""
    return codes.t().contiguous()


def transpose_folded(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.kernels.transpose.transpose_folded`."""
    return codes.t().contiguous(), torch.ones(codes.shape[1], 1, device=codes.device, dtype=torch.float32)
