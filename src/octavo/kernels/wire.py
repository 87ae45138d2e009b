"""The wire contract: a gradient quantised into messages, and the sum of the messages that arrive.

`kernels.message` says how a message lies in memory. Both functions run between collectives, never in a compiled graph:
they are plain functions, not operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.dispatch import run_twin
from octavo.kernels.message import message_bytes


def pack(x: Tensor, messages: int, length: int) -> Tensor:
    """Quantise a gradient into messages: the values m * length to (m + 1) * length - 1 are message m.

    Finite values are rounded to nearest and never saturate. NaN and infinities become NaN, and touch no scale. Where
    the values end before the last message does, it goes on with zeros, which touch no scale either.

    Args:
        x: (n,), FP32, BF16 or FP16, contiguous; n <= messages * length.

    Returns:
        uint8 (messages, message_bytes(length)).

    Raises:
        ConfigError: x is not such a vector, or has more values than the messages hold.
    """
    _check_vector("pack", x, messages * length)
    if not messages * length:
        return torch.empty(messages, message_bytes(length), dtype=torch.uint8, device=x.device)
    packed: Tensor = run_twin("wire.pack", x, (x, messages, length), "pack")
    return packed


def add(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """Decode messages and sum them into `out`.

        out[p * length + i] = factor * (value i of messages[p, 0] + value i of messages[p, 1] + ...)

    In FP32, in this order, rounded once to the dtype of `out`. With one message a part this decodes, with one part it
    reduces. NaN and infinities come through.

    Args:
        messages: (parts, terms, message_bytes(length)) uint8, as `pack` makes them; or the values themselves, BF16,
            FP16 or FP32 (parts, terms, length). Contiguous.
        out: (n,), FP32, BF16 or FP16, contiguous; n <= parts * length: what is beyond its end is dropped.

    Raises:
        ConfigError: the messages have another length, or `out` is longer than all of them.
    """
    parts, _, width = messages.shape
    expected = message_bytes(length) if messages.dtype == torch.uint8 else length
    if width != expected or not messages.is_contiguous():
        raise ConfigError(f"add: messages {tuple(messages.shape)} of {messages.dtype} do not hold {length} values.")
    _check_vector("add", out, parts * length)
    if out.numel():
        run_twin("wire.add", messages, (messages, length, out, factor), "add")


def _check_vector(name: str, x: Tensor, limit: int) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.numel() > limit:
        raise ConfigError(
            f"{name}: a vector {tuple(x.shape)} for messages that hold {limit} values: flatten it, contiguous."
        )
