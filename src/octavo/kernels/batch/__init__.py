"""Batches of FP8 matrices of one shape, each matrix with its own scales.

    quantize_batch     `quantize_pair` per matrix
    transpose_batch    byte transpose per matrix

On a GPU each is one launch for the whole batch; elsewhere, and by definition, a loop over the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair
from octavo.kernels.runtime.dispatch import launches_on, uses_triton
from octavo.kernels.runtime.operator import call, define_packed
from octavo.numerics import PER_TENSOR, Granularity, Quantized, TILE_1x128


class Batch(NamedTuple):
    """B matrices (R, C) in FP8.

    codes: (B, R, C), contiguous, a float8 dtype.  scale: FP32 (B, r, c), where (r, c) is
    `granularity.scale_shape(R, C)`, each matrix in the layout of `quant_spec.empty_scale`.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity

    def matrices(self) -> list[Quantized]:
        """Return views of the matrices."""
        pairs = zip(self.codes.unbind(), self.scale.unbind(), strict=True)
        return [Quantized(codes, scale, self.granularity) for codes, scale in pairs]

    def transposed(self) -> Batch:
        """Return all matrices transposed, (B, C, R), contiguous: the same codes, without requantisation."""
        return Batch(transpose_batch(self.codes), self.scale.transpose(1, 2), self.granularity.transposed)

    def without_scale(self) -> Batch:
        """Return the same codes with scale 1 per matrix: the scales are folded into the other operand."""
        return Batch(self.codes, self.scale.new_ones(self.scale.shape[0], 1, 1), PER_TENSOR)


def batch_of(matrices: Sequence[Quantized | None]) -> Batch | None:
    """Copy matrices of one shape into a batch; None if all are None."""
    present = [matrix for matrix in matrices if matrix is not None]
    if not present:
        return None
    codes = torch.stack([matrix.codes.view(torch.uint8) for matrix in present]).view(present[0].codes.dtype)
    scale = torch.stack([matrix.scale for matrix in present])
    if present[0].granularity == TILE_1x128:
        scale = scale.mT.contiguous().mT
    return Batch(codes, scale, present[0].granularity)


def quantize_batch(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Batch | None, Batch | None]:
    """Quantise B >= 1 matrices (R, C), each as by `quantize_pair`: row-major, and transposed.

    Args:
        x: (B, R, C), FP32, BF16 or FP16; transposed views are read without a copy.
        rows: target for x * row_fold, or None to skip it.
        columns: target for the transpose of x * column_fold, or None.
        row_fold: FP32 (B, 1, C).
        column_fold: FP32 (B, R, 1).

    Returns:
        x, codes (B, R, C), and its transpose, codes (B, C, R).
    """
    results = call("quantize_batch", _quantize_batch, (x, rows, columns, row_fold, column_fold), (rows, columns))
    row, column = (None if batch is None else Batch(*batch) for batch in results)
    return row, column


def transpose_batch(codes: Tensor) -> Tensor:
    """Transpose contiguous codes (B, R, C) of any one-byte dtype into contiguous (B, C, R)."""
    result: Tensor = call("transpose_batch", _transpose_batch, (codes,), [True])[0]
    return result


def _quantize_batch(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *folds: Tensor | None
) -> Sequence[Batch | None]:
    if x.numel() and x.is_cuda:
        from octavo.kernels.batch import triton as fast

        if uses_triton(x, "quantize_batch", fast.unsupported_reason(x, rows, columns)):
            with launches_on(x.device):
                return fast.quantize_batch(x, rows, columns, *folds)
    unbound = [[None] * x.shape[0] if fold is None else fold.unbind() for fold in folds]
    parts = [quantize_pair([matrix], rows, columns, *fold) for matrix, *fold in zip(x.unbind(), *unbound, strict=True)]
    return [batch_of([row for row, _ in parts]), batch_of([column for _, column in parts])]


def _quantize_batch_shape(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None
) -> list[Batch | None]:
    batch, height, width = x.shape

    def empty(target: QuantSpec | None, height: int, width: int) -> Batch | None:
        if target is None:
            return None
        down, across = target.tile.scale_shape(height, width)
        layout = (batch, across, down) if target.tile == TILE_1x128 else (batch, down, across)
        scale = x.new_empty(layout, dtype=torch.float32)
        scale = scale.mT if target.tile == TILE_1x128 else scale
        return Batch(x.new_empty(batch, height, width, dtype=target.fmt.dtype), scale, target.tile)

    return [empty(rows, height, width), empty(columns, width, height)]


def _transpose_batch(codes: Tensor) -> list[Tensor]:
    refused = None if codes.shape[1] % 4 == 0 else f"{codes.shape[1]} rows are not a multiple of 4"
    if codes.numel() and uses_triton(codes, "transpose_batch", refused):
        from octavo.kernels.batch import triton as fast

        with launches_on(codes.device):
            return [fast.transpose_batch(codes)]
    return [codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)]


def _transpose_batch_shape(codes: Tensor) -> list[Tensor]:
    return [codes.new_empty(codes.shape[0], codes.shape[2], codes.shape[1])]


define_packed("quantize_batch", _quantize_batch, _quantize_batch_shape)
define_packed("transpose_batch", _transpose_batch, _transpose_batch_shape)
