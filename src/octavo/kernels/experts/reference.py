"""Reference passes over the rows of experts. See `octavo.kernels.experts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.activation.reference import value_and_slope
from octavo.kernels.grouped.reference import quantize_groups, transpose_groups
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize.reference import quantize_pair
from octavo.numerics import Quantized, dequantize
from octavo.numerics.quantize import to_codes


def quantize_tokens(x: Tensor, place: Tensor, target: QuantSpec, second: QuantSpec | None = None) -> list[Quantized]:
    """See `octavo.kernels.experts.quantize_tokens`."""
    made, other = (quantize_pair([x], spec, None)[0] for spec in (target, second))
    assert made is not None
    source = torch.empty(place.numel(), dtype=torch.int64, device=x.device)
    source[place.flatten().long()] = torch.arange(len(x), device=x.device).repeat_interleave(place.shape[1])
    codes = made.codes.view(torch.uint8)[source].view(made.codes.dtype)
    return [other or made, Quantized(codes, made.scale[source], made.granularity)]


def combine(y: Tensor, place: Tensor) -> Tensor:
    """See `octavo.kernels.experts.combine`."""
    total = torch.zeros(place.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for rows in place.t():
        total += y[rows.long()].float()
    return total.to(y.dtype)


def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    weights: Tensor,
    ends: Tensor,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None, Tensor | None, Tensor]:
    """See `octavo.kernels.experts.activation_backward`: D per row, D per column, codes of h, d weights."""
    (rows, columns, hidden), (row_fold, column_fold, scale) = targets, factors
    gate = gate if isinstance(gate, Tensor) else dequantize(gate)
    up = up if up is None or isinstance(up, Tensor) else dequantize(up)
    f, slope = value_and_slope(kind, gate.float())
    h = f if up is None else f * up.float()
    parts = [dh.float() * slope] if up is None else [dh.float() * up.float() * slope, dh.float() * f]
    d = torch.cat(parts, dim=1) * weights[:, None]
    row, column = quantize_groups(d, ends, rows, columns, row_fold, column_fold)
    h_t = None
    if hidden is not None and scale is not None:
        h_t = transpose_groups(to_codes(h * (1 / scale), hidden.fmt), ends)  # exact, as scales are powers of two
    return row, column, h_t, (dh.float() * h).sum(1)
