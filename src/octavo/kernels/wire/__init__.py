"""The wire contract: quantisation of a gradient into messages, and reduction of received messages.

`kernels.message` defines the message format. Both functions run between collectives, never in a compiled graph, so they
are plain functions, not operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.wire.message import message_bytes


def pack(x: Tensor, messages: int, length: int) -> Tensor:
    """Quantise a gradient into messages; message m holds the values m * length to (m + 1) * length - 1.

    Finite values are rounded to nearest and never saturate. NaN and infinities become NaN, and do not affect scales.
    The last messages are padded with zeros, which do not affect scales either.

    Args:
        x: (n,), FP32, BF16 or FP16, contiguous; n <= messages * length.

    Returns:
        uint8 (messages, message_bytes(length)).

    Raises:
        ConfigError: x is not a contiguous vector, or does not fit the messages.
    """
    _check_vector("pack", x, messages * length)
    if not messages * length:
        return torch.empty(messages, message_bytes(length), dtype=torch.uint8, device=x.device)
    packed: Tensor = run_kernel("wire.pack", x, (x, messages, length), "pack")
    return packed


def add(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """Dequantise messages and write their sum to `out`.

        out[p * length + i] = factor * (value i of messages[p, 0] + value i of messages[p, 1] + ...)

    Accumulated in FP32, in this order, and rounded once to the dtype of `out`. With one term per part this dequantises,
    with one part it reduces. NaN and infinities propagate.

    Args:
        messages: (parts, terms, message_bytes(length)) uint8, from `pack`; or plain values (parts, terms, length),
            BF16, FP16 or FP32. Contiguous.
        out: (n,), FP32, BF16 or FP16, contiguous; n <= parts * length, values beyond n are dropped.

    Raises:
        ConfigError: messages of another length, or `out` is longer than all parts.
    """
    parts, _, width = messages.shape
    expected = message_bytes(length) if messages.dtype == torch.uint8 else length
    if width != expected or not messages.is_contiguous():
        raise ConfigError(f"add: messages {tuple(messages.shape)} of {messages.dtype} do not hold {length} values.")
    _check_vector("add", out, parts * length)
    if out.numel():
        run_kernel("wire.add", messages, (messages, length, out, factor), "add")


def _check_vector(name: str, x: Tensor, limit: int) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.numel() > limit:
        raise ConfigError(
            f"{name}: {tuple(x.shape)} for messages that hold {limit} values: flatten it, and make it contiguous."
        )
