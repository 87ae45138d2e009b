"""Checks of a layer's operands: errors for what PyTorch refuses, warnings for dtypes that cost accuracy or time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from octavo._util.compiler import assume_constant_result
from octavo.errors import ConfigError
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn.weight_notes import WeightNotes

REAL = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
"""Dtypes of operands that are quantised. A cast of others would drop imaginary parts, or results would become
integers."""


LAYERS = WeightNotes("octavo_name")
"""Names of converted layers, for messages."""


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device; None where it is off. `meta` has none, and PyTorch raises."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def no_autocast(device: str) -> AbstractContextManager[None]:
    """Return a block without autocast on a type of device; on `meta`, which has none, a block that does nothing."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def layer_of(weight: Tensor) -> str:
    """Return the start of a message on the layer of a weight: its name in the model that was converted, if any."""
    name = LAYERS.of(weight)
    return "" if name is None else f"layer '{name}': " if name else "the model itself: "


@cache
def dtype_note(dtype: torch.dtype, device: str) -> str | None:
    """Return a note on layers that compute in a dtype on a type of device, or None: on `meta` nothing is computed."""
    if device == "meta":
        return None
    if dtype == torch.float16:
        return (
            "FP8 layers compute in FP16: results above 65504 are infinite, and gradients below 6e-8 are zero. Use BF16 "
            f'(torch.autocast("{device}", torch.bfloat16)), or scale the loss (torch.amp.GradScaler)'
        )
    if dtype == torch.float32 and device == "cuda":
        return (
            "FP8 layers return FP32, at twice the memory and time of BF16: run the model under "
            'torch.autocast("cuda", torch.bfloat16), or make it BF16 with an optimizer that keeps master weights '
            '(octavo.optim with states="exact")'
        )
    return None


@assume_constant_result
def note_dtype(dtype: torch.dtype, device: str) -> None:
    """Log a warning with the result of `dtype_note`, once; in compiled code when it is traced."""
    if (note := dtype_note(dtype, device)) is not None:
        warn_once(note)


def check_dtypes(*operands: Tensor) -> None:
    """Check that operands are real floating-point tensors.

    Raises:
        ConfigError: one is not.
    """
    for operand in operands:
        if operand.dtype not in REAL:
            raise ConfigError(
                f"an operand of shape {tuple(operand.shape)} is {operand.dtype}: FP8 products take FP32, BF16, FP16 or "
                "FP64. Convert it first, if that is meant: x.to(torch.bfloat16)."
            )
