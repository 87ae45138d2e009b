"""What a kernel is asked to make of a matrix."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from octavo.numerics import Format, Granularity, Quantized, Rounding, Scaling, format_named, granularity_named


class Target(NamedTuple):
    """Codes of a format, one scale a tile."""

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

    def __str__(self) -> str:
        return " ".join(self)


@cache
def target_of(text: str) -> Target | None:
    """Return the target that `str` gave, None for an empty text: operators take plain types."""
    if not text:
        return None
    format, granularity, scaling, rounding = text.split()
    return Target(format, granularity, cast(Scaling, scaling), cast(Rounding, rounding))


def empty(target: Target, rows: int, cols: int, device: torch.device) -> Quantized:
    """Return an (rows, cols) matrix of that kind, its memory not written yet."""
    codes = torch.empty(rows, cols, dtype=target.fmt.dtype, device=device)
    scale = torch.empty(target.tile.scale_shape(rows, cols), dtype=torch.float32, device=device)
    return Quantized(codes, scale, target.tile)


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (R, C) with its rows contiguous: a copy only where they are not."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
