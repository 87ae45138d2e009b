"""Reference quantisation: concatenate or normalise, fold, quantise X and X^T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, laid_out
from octavo.numerics import PER_ROW, Quantized, quantize, to_codes


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


def quantize_normed(
    x: Tensor, norm: tuple[Tensor, Tensor], target: QuantSpec, second: QuantSpec | None
) -> tuple[Quantized, Tensor | None]:
    """See `octavo.kernels.quantize.quantize_normed`."""
    y = normed(x, norm)
    codes, others = (_quantize(y, spec, None) for spec in (target, second))
    return cast("Quantized", codes), others and others.scale


def quantize_rows_twice(
    matrices: Sequence[Tensor], first: QuantSpec, second: QuantSpec, keeps_codes: bool
) -> tuple[Quantized, Tensor | None, Tensor]:
    """See `octavo.kernels.quantize.quantize_rows_twice`."""
    x = matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))
    made, rows = (cast("Quantized", _quantize(x, target, None)) for target in (first, second))
    return made, rows.codes if keeps_codes else None, rows.scale


def requantize_transposed(
    weights: Sequence[Tensor],
    scale: Tensor,
    target: QuantSpec,
    after: Tensor,
    norm: tuple[Tensor, Tensor] | None = None,
) -> Quantized:
    """See `octavo.kernels.quantize.requantize_transposed`."""
    values = torch.cat(list(weights)).float() if norm is None else normed(weights[0], norm)
    codes = to_codes(values * scale.reciprocal(), target.fmt)
    return Quantized(codes.t().contiguous(), scale.new_ones(weights[0].shape[1], 1), PER_ROW)


def normed(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    """Return x * rstd * weight in FP32, from (rstd (M,), weight (D,))."""
    return x.float() * norm[0][:, None] * norm[1].float()


def _quantize(x: Tensor, target: QuantSpec | None, fold: Tensor | None) -> Quantized | None:
    if target is None:
        return None
    if fold is not None:
        x = x.float() * fold
    return laid_out(quantize(x, target.format, target.granularity, target.scaling, rotation=target.rotation))
