"""The host's side of `codes.emit`: the memory of one target, and the arguments that kernels take for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, empty_scale
from octavo.kernels.triton.codes import BLOCK, COLUMN_TILE, NONE, ROW_TILE, mode_of, scales_kernel
from octavo.kernels.triton.shape import cdiv
from octavo.numerics import Granularity, Quantized


class Output:
    """Codes and scales of a (rows, cols) matrix, or of its transpose, that a kernel is about to write.

    Where it `searches`, a first pass leaves maxima in the memory of `inverse`. The programs that write make scales of
    them (`FROM_AMAX`), or `end_searches` does, in a launch of its own, where many programs would make each scale again.
    A transpose is written in words of four codes, so its memory is rounded up to that; `quantized` is without the
    surplus.
    """

    is_tiled: bool
    """Whether its scales belong to tiles of 128 columns of the matrix, which must not straddle two sources."""
    is_high: bool
    """Whether its scales belong to tiles of 128 rows of the matrix."""
    scales: int
    """How many a matrix has."""

    def __init__(
        self,
        target: QuantSpec | None,
        rows: int,
        cols: int,
        device: torch.device,
        *,
        transposed: bool = False,
        scale: Tensor | None = None,
        in_sight: bool = False,
        batch: int | None = None,
    ) -> None:
        """Allocate the memory.

        Args:
            batch: number of such matrices, one after another; None for a matrix of two dimensions.
            scale: scales, one per row of the matrix, where they are known already: nothing is searched.
            in_sight: the programs that write see tiles of 128 rows whole: their maxima are not searched either.
        """
        self.mode: int = NONE.value
        self.scaling = 1 if target is None else target.rule
        self.is_tiled = self.is_high = self.searches = False
        self.inverse: Tensor | None = None
        self._codes: Tensor | None = None
        self._written: Quantized | None = None
        self._strides: tuple[int, ...] = 0, 0
        self.scales = 0
        self._surplus = -rows % 4 if transposed else 0
        if target is None:
            return
        self.mode, tile, dtype = _facts(target, transposed)
        self.is_tiled, self.is_high = self.mode in _TILED, self.mode in _HIGH
        shape = (cols, rows) if transposed else (rows, cols)
        many = () if batch is None else (batch,)
        self._codes = torch.empty(*many, shape[0], shape[1] + self._surplus, dtype=dtype, device=device)
        written = one = empty_scale(target, *shape, device if batch is None else torch.device("meta"))
        self.scales, self._strides = one.numel(), (one.t() if transposed else one).stride()
        if batch is not None:
            lies = (self.scales, *one.stride())
            written = torch.empty_strided((batch, *one.shape), lies, dtype=one.dtype, device=device)
        self._written = Quantized(self._codes, written, tile)
        if scale is not None:
            self.inverse = scale.reshape(-1).reciprocal()
            written.copy_(scale.reshape(written.shape))
        else:
            self.searches = self.mode != ROW_TILE.value and not (in_sight and self.is_high)

    @property
    def searched(self) -> int:
        """The mode of the search for its maxima; `NONE` where there is none."""
        return self.mode if self.searches else NONE.value

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a kernel takes: `codes, scale, stride_r, stride_c, inverse`."""
        if self.searches and self.inverse is None:
            begin_searches(self)
        return self._codes, None if self._written is None else self._written.scale, *self._strides, self.inverse

    @property
    def quantized(self) -> Quantized | None:
        """What was asked for; None without a target."""
        if self._written is None or not self._surplus:
            return self._written
        return self._written._replace(codes=self._written.codes[:, : -self._surplus].contiguous())


@cache
def _facts(target: QuantSpec, transposed: bool) -> tuple[int, Granularity, torch.dtype]:
    mode = mode_of(target.tile.transposed.name if transposed else target.granularity)
    assert mode is not None, "the dispatcher asks `unsupported_reason` first"
    return mode, target.tile, target.fmt.dtype


_TILED, _HIGH = (ROW_TILE.value, BLOCK.value), (COLUMN_TILE.value, BLOCK.value)


def begin_searches(*outputs: Output) -> None:
    """Put zeros where a search is to leave maxima, which lie as the scales do: one launch for all outputs."""
    searching = [(output, output.quantized.scale) for output in outputs if output.searches and output.quantized]
    sizes = [-(-scale.numel() // 4) * 4 for _, scale in searching]  # aligned to 16 bytes
    if not searching:
        return
    device = searching[0][1].device
    if type(searching[0][1]) is not Tensor:  # traced: views of one memory that kernels write would become copies
        for output, scale in searching:
            output.inverse = torch.zeros(scale.numel(), dtype=torch.float32, device=device)
        return
    zeros = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    for (output, scale), part in zip(searching, zeros.split(sizes), strict=True):
        output.inverse = part if part.numel() == scale.numel() else part[: scale.numel()]


def end_searches(*outputs: Output) -> None:
    """Turn the maxima of a search into scales, and into what values are multiplied by: one launch for two outputs."""
    searching = [output for output in outputs if output.searches]
    for first in range(0, len(searching), 2):
        end_search(*(_found(output) for output in searching[first : first + 2]))


def end_search(*searches: tuple[Tensor, Tensor, bool, int]) -> None:
    """Do that for one or two: maxima, memory of the scales, whether codes are E4M3, and `QuantSpec.rule`."""
    counts = [search[0].numel() for search in searches]
    arguments = [(amax, scale, count, *how) for (amax, scale, *how), count in zip(searches, counts, strict=True)]
    scales_kernel[(cdiv(max(counts), 1024), len(counts))](
        *arguments[0], *(arguments[1] if len(counts) == 2 else (None, None, 0, False, False)), SIZE=1024, num_warps=4,
    )  # fmt: skip


def _found(output: Output) -> tuple[Tensor, Tensor, bool, int]:
    codes, scale, _, _, amax = output.arguments
    return amax, scale, codes.dtype == torch.float8_e4m3fn, output.scaling
