"""What the backward of attention takes for a while on a GPU, which no shape of its results tells.

On paper `F.scaled_dot_product_attention` is PyTorch's flash attention for the CPU. What it keeps is what all fused
kernels keep: the inputs, the output, and a number a row. Its workspace is taken to be cuDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def workspace(operator: Any, arguments: Sequence[Any]) -> int:
    """Return the bytes that an operator takes beside its results if it is a backward of attention, else 0.

    dQ is summed in FP32, and so is a number a row. Where query heads share a key, dK and dV are made for each query
    head, in their own dtype, and added up then. Source: cuDNN frontend, `CompositeSDPABackwardNode`.
    """
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        _, query, key, value = arguments[:4]
        return _of_cudnn(query, key, value)
    if operator is torch.ops.octavo.attention_backward.default:  # (B, T, H, E), and an output that it decodes first
        query, key, value = (x.transpose(1, 2) for x in arguments[1:4])
        return _of_cudnn(query, key, value) + int(query.numel() * query.element_size())
    return 0


def _of_cudnn(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes for q (..., H, T, E), k and v (..., G, S, E)."""
    sums = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
    shares = query.shape[-3] // key.shape[-3]
    repeated = (key.numel() + value.numel()) * key.element_size() * shares if shares > 1 else 0
    return int(sums + repeated)
