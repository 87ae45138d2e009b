"""The host's side of `codes.emit`: the memory of one target, and the arguments that kernels take for it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.target import Target, empty_scale
from octavo.kernels.triton.codes import BLOCK, NONE, ROW_TILE, mode_of, scales_kernel
from octavo.numerics import Quantized


class Output:
    """Codes and scales of a (rows, cols) matrix, or of its transpose, that a kernel is about to write.

    `arguments` are `codes, scale, stride_r, stride_c, inverse`. Where `searches`, a first pass leaves maxima in the
    memory of `inverse`, and `end_search` makes scales of them. A transpose is written in words of four codes, so its
    memory is rounded up to that; `quantized` is without the surplus.
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
        self._written: Quantized | None = None
        self._surplus = -rows % 4 if transposed else 0
        self.mode: int = NONE.value
        self.searches = False
        self.arguments: tuple[Any, ...] = (None, None, 0, 0, None)
        self.power_of_two = target is None or target.scaling == "power_of_two"
        if target is None:
            return
        mode = mode_of(target.tile.transposed.name if transposed else target.granularity)
        assert mode is not None, "the dispatcher asks `refuses` first"
        self.mode = mode
        shape = (cols, rows) if transposed else (rows, cols)
        codes = torch.empty(shape[0], shape[1] + self._surplus, dtype=target.fmt.dtype, device=device)
        written = empty_scale(target, *shape, device)
        self._written = Quantized(codes, written, target.tile)
        self.searches = scale is None and mode != ROW_TILE.value
        inverse: Tensor | None = None
        if scale is not None:
            inverse = scale.reshape(-1).reciprocal()  # exact
            written.copy_(scale.reshape(written.shape))
        elif self.searches:
            inverse = torch.zeros(written.numel(), dtype=torch.float32, device=device)  # lies as the scales do
        strides = (written.t() if transposed else written).stride()
        self.arguments = (codes, written, *strides, inverse)

    def end_search(self) -> None:
        """Turn the maxima that a search has left into scales, and into what values are multiplied by."""
        if not self.searches:
            return
        codes, scale, _, _, amax = self.arguments
        format = tl.float8e4nv if codes.dtype == torch.float8_e4m3fn else tl.float8e5
        scales_kernel[(triton.cdiv(amax.numel(), 1024),)](
            amax, scale, amax.numel(), FORMAT=format, POWER_OF_TWO=self.power_of_two, SIZE=1024, num_warps=4
        )

    @property
    def quantized(self) -> Quantized | None:
        """What was asked for; None without a target."""
        if self._written is None or not self._surplus:
            return self._written
        return self._written._replace(codes=self._written.codes[:, : -self._surplus].contiguous())

    @property
    def is_tiled(self) -> bool:
        """Whether its scales belong to tiles of 128 columns of the matrix, which must not straddle two sources."""
        return self.mode in (ROW_TILE.value, BLOCK.value)
