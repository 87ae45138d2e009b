"""What a kernel is asked to make of a matrix."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from octavo.numerics import (
    Format,
    Granularity,
    Quantized,
    Rounding,
    Scaling,
    TILE_1x128,
    format_named,
    granularity_named,
)
from octavo.recipes import Operand

_RULES: dict[Scaling, int] = {"float32": 0, "power_of_two": 1, "engine": 2}


class QuantSpec(NamedTuple):
    """Codes of a format, one scale per tile."""

    format: str
    granularity: str
    scaling: Scaling
    rounding: Rounding = "nearest"
    """Fused kernels round to nearest only."""

    @property
    def fmt(self) -> Format:
        """The format itself."""
        return format_named(self.format)

    @property
    def tile(self) -> Granularity:
        """The granularity itself."""
        return granularity_named(self.granularity)

    @property
    def rule(self) -> int:
        """Number of the scaling, as kernels take it (`octavo.kernels.triton.codes`)."""
        return _RULES[self.scaling]

    def __str__(self) -> str:
        return " ".join(self)


def spec_of(operand: Operand) -> QuantSpec:
    """Return what a kernel is asked to make for an operand of a recipe."""
    return QuantSpec(operand.format, operand.granularity, operand.scaling, operand.rounding)


@cache
def parse_spec(text: str) -> QuantSpec | None:
    """Return the target that `str` gave, None for an empty text: operators take plain types."""
    if not text:
        return None
    format, granularity, scaling, rounding = text.split()
    return QuantSpec(format, granularity, cast(Scaling, scaling), cast(Rounding, rounding))


def empty(target: QuantSpec, rows: int, cols: int, device: torch.device) -> Quantized:
    """Return an (rows, cols) matrix of that kind, its memory not written yet."""
    codes = torch.empty(rows, cols, dtype=target.fmt.dtype, device=device)
    return Quantized(codes, empty_scale(target, rows, cols, device), target.tile)


def empty_scale(target: QuantSpec, rows: int, cols: int, device: torch.device) -> Tensor:
    """Return the memory for the scales of an (rows, cols) matrix.

    Scales of 1x128 tiles lie column after column, as GEMMs read them: those of one step of the sum together.
    """
    if target.granularity == "row":
        return torch.empty(rows, 1, dtype=torch.float32, device=device)
    shape = target.tile.scale_shape(rows, cols)
    if target.tile == TILE_1x128:
        return torch.empty(shape[::-1], dtype=torch.float32, device=device).t()
    return torch.empty(shape, dtype=torch.float32, device=device)


def laid_out(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes, and scales that lie as `empty_scale` says."""
    scale = quantized.scale
    scale = scale.t().contiguous().t() if quantized.granularity == TILE_1x128 else scale.contiguous()
    return Quantized(quantized.codes.contiguous(), scale, quantized.granularity)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (R, C) with its rows contiguous: a copy only where they are not."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
