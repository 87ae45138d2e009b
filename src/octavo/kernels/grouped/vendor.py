"""`torch._grouped_mm` for BF16 (Hopper and later)."""

from __future__ import annotations

import torch
from torch import Tensor


def unsupported_reason(a: Tensor, b: Tensor) -> str | None:
    """Return why `torch._grouped_mm` cannot take a and b, or None."""
    if not a.is_cuda or 0 in (*a.shape, *b.shape):
        return "there is nothing to gain on a CPU or for empty operands"
    if a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device)[0] < 9:
        return f"it is fast for BF16 on Hopper and later, this is {a.dtype}"
    features = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return f"{features[0]} or {features[1]} features are not a multiple of 8" if any(n % 8 for n in features) else None


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """See `octavo.kernels.grouped.grouped_mm`."""
    return torch._grouped_mm(a, b, offs=ends)
