"""Reference gradient messages in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.wire.message import message_bytes
from octavo.numerics import E4M3, TILE_1x128, quantize

EMPTY = 1
"""E8M0 code of 2^-126, the scale of empty groups."""


def pack(x: Tensor, messages: int, length: int) -> Tensor:
    """See `octavo.kernels.wire.pack`."""
    rows = x.new_zeros(messages * length)
    rows[: x.numel()] = x
    codes, scale, _ = quantize(rows.view(messages, length), E4M3, TILE_1x128)
    out = torch.full((messages, message_bytes(length)), EMPTY, dtype=torch.uint8, device=x.device)
    out[:, :length] = codes.view(torch.uint8)
    out[:, length : length + scale.shape[1]] = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return out


def add(messages: Tensor, length: int, out: Tensor, factor: float) -> None:
    """See `octavo.kernels.wire.add`."""
    total = torch.zeros(messages.shape[0], length, device=messages.device, dtype=torch.float32)
    for term in messages.unbind(1):
        total += decode(term, length) if term.dtype == torch.uint8 else term
    out.copy_((total * factor).flatten()[: out.numel()])


def decode(messages: Tensor, length: int) -> Tensor:
    """Dequantise messages (M, bytes) to FP32 (M, length)."""
    codes = messages[:, :length].contiguous().view(E4M3.dtype).float()
    groups = TILE_1x128.scale_shape(1, length)[1]
    scale = (messages[:, length : length + groups].to(torch.int32) << 23).view(torch.float32)
    return codes * TILE_1x128.expand(scale, *codes.shape)
