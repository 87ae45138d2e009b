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

from octavo.kernels.batch import reference
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.runtime.dispatch import implementation
from octavo.kernels.runtime.operation import operation
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
    stacked = reference.stacked(matrices)
    return None if stacked is None else Batch(*stacked)


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
    row, column = (made and Batch(*made) for made in _quantize_batch(x, rows, columns, row_fold, column_fold))
    return row, column


def _quantize_fake(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, *_: Tensor | None
) -> list[Quantized | None]:
    batch, height, width = x.shape

    def empty(target: QuantSpec | None, height: int, width: int) -> Quantized | None:
        if target is None:
            return None
        down, across = target.tile.scale_shape(height, width)
        layout = (batch, across, down) if target.tile == TILE_1x128 else (batch, down, across)
        scale = x.new_empty(layout, dtype=torch.float32)
        scale = scale.mT if target.tile == TILE_1x128 else scale
        return Quantized(x.new_empty(batch, height, width, dtype=target.fmt.dtype), scale, target.tile)

    return [empty(rows, height, width), empty(columns, width, height)]


@operation(
    reference=reference.quantize_batch,
    unsupported=lambda x, rows, columns, *_: implementation("triton", "batch").unsupported_reason(x, rows, columns),
    fake=_quantize_fake,
    results=lambda _x, rows, columns, *_: (rows, columns),
)
def _quantize_batch(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_fold: Tensor | None, column_fold: Tensor | None
) -> tuple[Quantized | None, Quantized | None]: ...


@operation(
    reference=reference.transpose_batch,
    unsupported=lambda x: f"{x.shape[1]} rows are not a multiple of 4" if x.shape[1] % 4 else None,
    fake=lambda codes: codes.new_empty(codes.shape[0], codes.shape[2], codes.shape[1]),
)
def transpose_batch(codes: Tensor) -> Tensor:
    """Transpose contiguous codes (B, R, C) of any one-byte dtype into contiguous (B, C, R)."""
