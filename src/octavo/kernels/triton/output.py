"""The host's side of `codes.emit`: the memory of one target, and the arguments that kernels take for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.target import Target, empty
from octavo.kernels.triton.codes import BLOCK, COLUMN, NONE, ROW, TENSOR, mode_of
from octavo.numerics import Quantized

SIDE = 128
"""Rows and columns of the tile that a program works on where scales belong to tiles."""


class Output:
    """Codes and scales of a (rows, cols) matrix, or of its transpose, that a kernel is about to write.

    `arguments` are `codes, scale, stride_r, stride_c, amax`, `constants` are `mode, power_of_two`.
    """

    def __init__(
        self,
        target: Target | None,
        rows: int,
        cols: int,
        device: torch.device,
        *,
        transposed: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        """`scale`: power-of-two scales, one a row of the matrix, where they are known already: nothing is searched."""
        self.quantized: Quantized | None = None
        self.mode: int = NONE.value
        self.searches = False
        self.arguments: tuple[Any, ...] = (None, None, 0, 0, None)
        self.constants: tuple[int, bool] = (self.mode, True)
        if target is None:
            return
        mode = mode_of(target.tile.transposed.name if transposed else target.granularity)
        assert mode is not None, "the dispatcher asks `refuses` first"
        self.mode = mode
        self.quantized = empty(target, *((cols, rows) if transposed else (rows, cols)), device)
        self.searches = scale is None and mode in (TENSOR.value, ROW.value, COLUMN.value)
        if scale is not None:
            amax: Tensor | None = scale.reshape(-1) * target.fmt.max  # exact, and gives this very scale again
        else:
            extent = {TENSOR.value: 1, ROW.value: rows, COLUMN.value: cols}.get(mode)
            amax = None if extent is None else torch.zeros(extent, dtype=torch.float32, device=device)
        written = self.quantized.scale
        strides = (written.t() if transposed else written).stride()
        self.arguments = (self.quantized.codes, written, *strides, amax)
        self.constants = (mode, target.scaling == "power_of_two")

    @property
    def is_tiled(self) -> bool:
        """Whether its scales belong to tiles of 128, which a program must hold as a whole."""
        return self.mode > COLUMN.value and self.mode <= BLOCK.value
