"""Host side of `codes.emit`: the buffers of one target, and the kernel arguments for them."""

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
    """Output buffers of a kernel: codes and scales of a (rows, cols) matrix, or of its transpose.

    If it `searches`, a first pass leaves maxima in `inverse`. Scales are computed from them by the programs that write
    (`FROM_AMAX`), or by `end_searches`, in a separate launch, if many programs would recompute each scale. A transpose
    is stored in words of four codes, so its buffer is padded to a multiple of four; `quantized` excludes the padding.
    """

    is_tiled: bool
    """Whether scales belong to tiles of 128 columns of the matrix, which must not straddle two sources."""
    is_high: bool
    """Whether scales belong to tiles of 128 rows of the matrix."""
    scales: int
    """Number of scales per matrix."""

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
        """Allocate the buffers.

        Args:
            batch: number of matrices, contiguous in memory; None for a two-dimensional matrix.
            scale: known scales, one per row of the matrix: no search.
            in_sight: whether the programs that write hold whole tiles of 128 rows, which then need no search.
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
        batch_dims = () if batch is None else (batch,)
        self._codes = torch.empty(*batch_dims, shape[0], shape[1] + self._surplus, dtype=dtype, device=device)
        written = single = empty_scale(target, *shape, device if batch is None else torch.device("meta"))
        self.scales, self._strides = single.numel(), (single.t() if transposed else single).stride()
        if batch is not None:
            strides = (self.scales, *single.stride())
            written = torch.empty_strided((batch, *single.shape), strides, dtype=single.dtype, device=device)
        self._written = Quantized(self._codes, written, tile)
        if scale is not None:
            self.inverse = scale.reshape(-1).reciprocal()
            written.copy_(scale.reshape(written.shape))
        else:
            self.searches = self.mode != ROW_TILE.value and not (in_sight and self.is_high)

    @property
    def searched(self) -> int:
        """Mode of the search for maxima; `NONE` without a search."""
        return self.mode if self.searches else NONE.value

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Kernel arguments: `codes, scale, stride_r, stride_c, inverse`."""
        if self.searches and self.inverse is None:
            begin_searches(self)
        return self._codes, None if self._written is None else self._written.scale, *self._strides, self.inverse

    @property
    def quantized(self) -> Quantized | None:
        """The result, without padding; None without a target."""
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
    """Allocate zeroed maxima for the searches, laid out like the scales: one launch for all outputs."""
    searching = [(output, output.quantized.scale) for output in outputs if output.searches and output.quantized]
    sizes = [-(-scale.numel() // 4) * 4 for _, scale in searching]  # aligned to 16 bytes
    if not searching:
        return
    device = searching[0][1].device
    if type(searching[0][1]) is not Tensor:  # traced: views of one buffer that kernels write would become copies
        for output, scale in searching:
            output.inverse = torch.zeros(scale.numel(), dtype=torch.float32, device=device)
        return
    zeros = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    for (output, scale), part in zip(searching, zeros.split(sizes), strict=True):
        output.inverse = part if part.numel() == scale.numel() else part[: scale.numel()]


def end_searches(*outputs: Output) -> None:
    """Compute scales from the maxima, and overwrite the maxima with inverse scales: one launch per two outputs."""
    searching = [output for output in outputs if output.searches]
    for first in range(0, len(searching), 2):
        end_search(*(_found(output) for output in searching[first : first + 2]))


def end_search(*searches: tuple[Tensor, Tensor, bool, int]) -> None:
    """The same for one or two searches, each (maxima, scales to write, whether codes are E4M3, `QuantSpec.rule`)."""
    counts = [search[0].numel() for search in searches]
    arguments = [(amax, scale, count, *how) for (amax, scale, *how), count in zip(searches, counts, strict=True)]
    scales_kernel[(cdiv(max(counts), 1024), len(counts))](
        *arguments[0], *(arguments[1] if len(counts) == 2 else (None, None, 0, False, False)), SIZE=1024, num_warps=4,
    )  # fmt: skip


def _found(output: Output) -> tuple[Tensor, Tensor, bool, int]:
    codes, scale, _, _, amax = output.arguments
    return amax, scale, codes.dtype == torch.float8_e4m3fn, output.scaling
