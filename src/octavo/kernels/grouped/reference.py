"""Reference quantisation of groups and high-precision products: a loop over the experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.kernels.grouped.padding import padded_ends, padded_length
from octavo.kernels.product import product
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import PER_ROW, quantize


def quantize_groups(
    x: Tensor,
    ends: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    row_fold: Tensor | None,
    column_fold: Tensor | None,
    source: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """See `octavo.kernels.grouped.quantize_groups`: (codes, scale) for rows and for columns."""
    x = x if source is None else x[source]
    groups = list(groups_of(ends))
    row = column = None
    if rows is not None:
        folded = x.float().clone()
        for e, tokens in enumerate(groups):
            folded[tokens] *= 1.0 if row_fold is None else row_fold[e]
        row = quantize(folded, rows.fmt, PER_ROW, rows.scaling)[:2]
    if columns is not None:
        folded = x.float() if column_fold is None else x.float() * column_fold
        parts = [quantize(folded[tokens].t(), columns.fmt, PER_ROW, columns.scaling) for tokens in groups]
        empty = x.new_empty(x.shape[1], 0, dtype=torch.uint8)  # bytes: torch.cat has no FP8 under autocast
        codes = torch.cat([empty, *(part.codes.view(torch.uint8) for part in parts)], dim=1).view(columns.fmt.dtype)
        scales = [part.scale.t() for part in parts]
        column = transpose_groups(codes.t(), ends), torch.cat([x.new_empty(0, x.shape[1]).float(), *scales])
    return row, column


def transpose_groups(codes: Tensor, ends: Tensor, source: Tensor | None = None) -> Tensor:
    """Return codes (T, C) transposed and padded, (C, P)."""
    codes = codes if source is None else codes.view(torch.uint8)[source].view(codes.dtype)
    shape = codes.shape[1], padded_length(codes.shape[0], ends.shape[0])
    out = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    for tokens, padded in zip(groups_of(ends), groups_of(padded_ends(ends)), strict=True):
        count = tokens.stop - tokens.start
        out[:, padded.start : padded.start + count] = codes[tokens].view(torch.uint8).t()
    return out.view(codes.dtype)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """See `octavo.kernels.grouped.grouped_mm`."""
    groups = list(groups_of(ends))
    if b.dim() == 2:
        parts = [product(a[:, tokens], b[tokens]) for tokens in groups]
        return torch.stack(parts) if parts else a.new_zeros(0, a.shape[0], b.shape[1])
    y = a.new_zeros(a.shape[0], b.shape[2])
    for e, tokens in enumerate(groups):
        y[tokens] = product(a[tokens], b[e])
    return y


def groups_of(ends: Tensor) -> Iterator[slice]:
    """Yield the tokens of each expert."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end
