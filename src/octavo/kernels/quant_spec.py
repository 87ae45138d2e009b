"""Quantisation targets (`QuantSpec`) as kernels use them: as text, and the memory of their codes and scales."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor

from octavo.numerics import Quantized, Rounding, Scaling, TILE_1x128
from octavo.recipes.operands import QuantSpec, spec_of

__all__ = [
    "QuantSpec",
    "contiguous_rows",
    "empty",
    "empty_scale",
    "laid_out",
    "parse_spec",
    "spec_of",
]


@cache
def parse_spec(text: str) -> QuantSpec | None:
    """Parse the `str` of a target, None for an empty string: operators take plain types."""
    if not text:
        return None
    format, granularity, scaling, rounding, rotation = text.split()
    return QuantSpec(format, granularity, cast(Scaling, scaling), cast(Rounding, rounding), int(rotation))


def empty(target: QuantSpec, rows: int, cols: int, device: torch.device) -> Quantized:
    """Allocate an uninitialised (rows, cols) matrix for a target."""
    codes = torch.empty(rows, cols, dtype=target.fmt.dtype, device=device)
    return Quantized(codes, empty_scale(target, rows, cols, device), target.tile)


def empty_scale(target: QuantSpec, rows: int, cols: int, device: torch.device) -> Tensor:
    """Allocate the scales of an (rows, cols) matrix.

    Scales of 1x128 tiles are column-major, the layout of GEMMs: contiguous within one K tile.
    """
    if target.granularity == "row":
        return torch.empty(rows, 1, dtype=torch.float32, device=device)
    shape = target.tile.scale_shape(rows, cols)
    if target.tile == TILE_1x128:
        return torch.empty(shape[::-1], dtype=torch.float32, device=device).t()
    return torch.empty(shape, dtype=torch.float32, device=device)


def laid_out(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes, and scales in the layout of `empty_scale`."""
    scale = quantized.scale
    scale = scale.t().contiguous().t() if quantized.granularity == TILE_1x128 else scale.contiguous()
    return Quantized(quantized.codes.contiguous(), scale, quantized.granularity)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (R, C) with contiguous rows, copied only if needed."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
