"""Many matrices of one shape in FP8, each with scales of its own.

    quantize_batch     `quantize_pair` of every matrix
    transpose_batch    the byte transpose of every matrix

On a GPU each is one launch for the whole batch, elsewhere, and by definition, a loop over the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.operator import call, define_packed
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair
from octavo.numerics import PER_TENSOR, Granularity, Quantized, TILE_1x128


class Batch(NamedTuple):
    """B matrices (R, C) in FP8.

    codes: (B, R, C), contiguous, a float8 dtype.  scale: FP32 (B, r, c), where (r, c) is what
    `granularity.scale_shape(R, C)` gives for one of them, and each lies as `target.empty_scale` says.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def matrices(self) -> list[Quantized]:
        """Return the matrices, views."""
        pairs = zip(self.codes.unbind(), self.scale.unbind(), strict=True)
        return [Quantized(codes, scale, self.granularity) for codes, scale in pairs]

    def transposed(self) -> Batch:
        """Return every matrix transposed, (B, C, R), its codes contiguous: the same codes, nothing is rounded again."""
        return Batch(transpose_batch(self.codes), self.scale.transpose(1, 2), self.granularity.transposed)

    def without_scale(self) -> Batch:
        """Return the same codes with a scale of 1 a matrix: theirs have gone into the other operand."""
        return Batch(self.codes, self.scale.new_ones(self.scale.shape[0], 1, 1), PER_TENSOR)


def batch_of(matrices: Sequence[Quantized | None]) -> Batch | None:
    """Return matrices of one shape as a batch, copies; None of nothing but None."""
    there = [matrix for matrix in matrices if matrix is not None]
    if not there:
        return None
    codes = torch.stack([matrix.codes.view(torch.uint8) for matrix in there]).view(there[0].codes.dtype)
    scale = torch.stack([matrix.scale for matrix in there])
    if there[0].granularity == TILE_1x128:
        scale = scale.mT.contiguous().mT
    return Batch(codes, scale, there[0].granularity)


def quantize_batch(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Batch | None, Batch | None]:
    """Quantise B >= 1 matrices (R, C), each as `quantize_pair` does: as it lies, and transposed.

    Args:
        x: (B, R, C), FP32, BF16 or FP16; transposed views are read as they lie.
        rows: how to quantise x * row_fold, or None for not at all.
        columns: how to quantise the transpose of x * column_fold, or None.
        row_fold: FP32 (B, 1, C).
        column_fold: FP32 (B, R, 1).

    Returns:
        x as it lies, codes (B, R, C), and transposed, codes (B, C, R).
    """
    made = call("quantize_batch", _quantize_batch, (x, rows, columns, row_fold, column_fold), (rows, columns))
    row, column = (None if batch is None else Batch(*batch) for batch in made)
    return row, column


def transpose_batch(codes: Tensor) -> Tensor:
    """Return the transposes (B, C, R), contiguous, of contiguous codes (B, R, C) of any one-byte dtype."""
    result: Tensor = call("transpose_batch", _transpose_batch, (codes,), [True])[0]
    return result


def _quantize_batch(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *folds: Tensor | None
) -> Sequence[Batch | None]:
    if x.numel() and x.is_cuda:
        from octavo.kernels.triton import batch as fast

        if uses_triton(x, "quantize_batch", fast.refuses(x, rows, columns)):
            with launches_on(x.device):
                return fast.quantize_batch(x, rows, columns, *folds)
    each = [[None] * x.shape[0] if fold is None else fold.unbind() for fold in folds]
    parts = [quantize_pair([matrix], rows, columns, *fold) for matrix, *fold in zip(x.unbind(), *each, strict=True)]
    return [batch_of([row for row, _ in parts]), batch_of([column for _, column in parts])]


def _quantize_batch_shape(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None
) -> list[Batch | None]:
    batch, height, width = x.shape

    def empty(target: QuantSpec | None, height: int, width: int) -> Batch | None:
        if target is None:
            return None
        down, across = target.tile.scale_shape(height, width)
        lies = (batch, across, down) if target.tile == TILE_1x128 else (batch, down, across)
        scale = x.new_empty(lies, dtype=torch.float32)
        scale = scale.mT if target.tile == TILE_1x128 else scale
        return Batch(x.new_empty(batch, height, width, dtype=target.fmt.dtype), scale, target.tile)

    return [empty(rows, height, width), empty(columns, width, height)]


def _transpose_batch(codes: Tensor) -> list[Tensor]:
    refused = None if codes.shape[1] % 4 == 0 else f"{codes.shape[1]} rows are no multiple of 4"
    if codes.numel() and uses_triton(codes, "transpose_batch", refused):
        from octavo.kernels.triton import batch as fast

        with launches_on(codes.device):
            return [fast.transpose_batch(codes)]
    return [codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)]


def _transpose_batch_shape(codes: Tensor) -> list[Tensor]:
    return [codes.new_empty(codes.shape[0], codes.shape[2], codes.shape[1])]


define_packed("quantize_batch", _quantize_batch, _quantize_batch_shape)
define_packed("transpose_batch", _transpose_batch, _transpose_batch_shape)
