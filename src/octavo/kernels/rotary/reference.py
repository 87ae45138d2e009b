"""Reference rotation of channel pairs, in FP32."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor:
    """See `octavo.kernels.rotary.rotate`; the tables are (1 or B, T, E/2 or E)."""
    first, second = x.float().chunk(2, dim=-1)
    cos1, cos2 = _halves(cos, x.shape[-1])
    sin1, sin2 = _halves(sin, x.shape[-1])
    if conjugate:
        sin1, sin2 = -sin2, -sin1
    rotated = torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), dim=-1)
    return rotated.to(x.dtype).contiguous()


def _halves(table: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns for the first and the second half of the channels, FP32 (1 or B, T, 1, E/2)."""
    wide = table.float()[:, :, None]
    return wide[..., : width // 2], wide[..., -(width // 2) :]
