"""Reference `quantize_pair`: concatenate the sources, fold, quantise X and X^T."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, laid_out
from octavo.numerics import Quantized, quantize


def quantize_pair(
    sources: Sequence[Tensor],
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None = None,
    column_fold: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """See `octavo.kernels.quantize.quantize_pair`."""
    x = torch.cat(list(sources), dim=1)
    return _quantize(x, rows, row_fold), _quantize(x.t(), columns, None if column_fold is None else column_fold.t())


def _quantize(x: Tensor, target: QuantSpec | None, fold: Tensor | None) -> Quantized | None:
    if target is None:
        return None
    if fold is not None:
        x = x.float() * fold
    return laid_out(quantize(x, target.fmt, target.tile, target.scaling, rotation=target.rotation))
