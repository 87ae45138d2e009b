"""Reference of batches: matrix by matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair
from octavo.numerics import Quantized, TILE_1x128


def quantize_batch(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, row_fold: Tensor | None, column_fold: Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.batch.quantize_batch`."""
    folds = [[None] * x.shape[0] if fold is None else fold.unbind() for fold in (row_fold, column_fold)]
    parts = [quantize_pair([matrix], rows, columns, *fold) for matrix, *fold in zip(x.unbind(), *folds, strict=True)]
    return stacked([row for row, _ in parts]), stacked([column for _, column in parts])


def stacked(matrices: Sequence[Quantized | None]) -> Quantized | None:
    """Return matrices of one shape as a batch, codes (B, R, C), as `octavo.kernels.batch.Batch`; None if all are."""
    present = [matrix for matrix in matrices if matrix is not None]
    if not present:
        return None
    codes = torch.stack([matrix.codes.view(torch.uint8) for matrix in present]).view(present[0].codes.dtype)
    scale = torch.stack([matrix.scale for matrix in present])
    if present[0].granularity == TILE_1x128:
        scale = scale.mT.contiguous().mT
    return Quantized(codes, scale, present[0].granularity)


def transpose_batch(codes: Tensor) -> Tensor:
    """See `octavo.kernels.batch.transpose_batch`."""
    return codes.view(torch.uint8).transpose(1, 2).contiguous().view(codes.dtype)
