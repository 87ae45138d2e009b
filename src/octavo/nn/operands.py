"""Check of what a layer is given: PyTorch refuses the same, where a cast would make something of it."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError

REAL = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
"""Dtypes of operands that are quantised. A cast would drop imaginary parts, and results would be cast to integers."""


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Check an input (..., K) and a weight (N, K), also where the input is empty.

    Raises:
        ConfigError: a dtype is an integer, complex or FP8 without scales, or K differs.
    """
    check_dtypes(x, weight)
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ConfigError(
            f"an input of shape {tuple(x.shape)} cannot be multiplied by a weight of shape {tuple(weight.shape)}: its "
            f"last dimension must be {weight.shape[-1]}."
        )


def check_dtypes(*operands: Tensor) -> None:
    """Check that operands are real floating-point numbers.

    Raises:
        ConfigError: one is not.
    """
    for operand in operands:
        if operand.dtype not in REAL:
            raise ConfigError(
                f"an operand of shape {tuple(operand.shape)} is {operand.dtype}: FP8 products take FP32, BF16, FP16 or "
                "FP64. Convert it first, if that is meant: x.to(torch.bfloat16)."
            )
