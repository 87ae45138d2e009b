"""Reference rotation of channel pairs, in FP32."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor:
    """See `octavo.kernels.rotary.rotate`; the tables are (1 or B, T, E/2)."""
    cos, sin = cos.float()[:, :, None], (-sin if conjugate else sin).float()[:, :, None]
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype).contiguous()
