"""Passes over the rows of experts as they are defined: see `octavo.kernels.experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.reference.activation import value_and_slope
from octavo.kernels.reference.quantize import quantize_pair
from octavo.numerics import Quantized, dequantize, format_named
from octavo.numerics.quantize import to_codes


def quantize_tokens(x: Tensor, place: Tensor, target: QuantSpec) -> list[Quantized]:
    """See `octavo.kernels.experts.quantize_tokens`."""
    tokens, _ = quantize_pair([x], target, None)
    assert tokens is not None
    source = torch.empty(place.numel(), dtype=torch.int64, device=x.device)
    source[place.flatten().long()] = torch.arange(len(x), device=x.device).repeat_interleave(place.shape[1])
    codes = tokens.codes.view(torch.uint8)[source].view(tokens.codes.dtype)
    return [tokens, Quantized(codes, tokens.scale[source], tokens.granularity)]


def combine(y: Tensor, place: Tensor) -> Tensor:
    """See `octavo.kernels.experts.combine`."""
    total = torch.zeros(place.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for rows in place.t():
        total += y[rows.long()].float()
    return total.to(y.dtype)


def activation_backward(
    kind: str, dh: Tensor, gate: Tensor | Quantized, up: Tensor | Quantized | None, weights: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `octavo.kernels.experts.activation_backward`: d inputs, codes of h, d weights."""
    gate = gate if isinstance(gate, Tensor) else dequantize(gate)
    up = up if up is None or isinstance(up, Tensor) else dequantize(up)
    f, slope = value_and_slope(kind, gate.float())
    h = f if up is None else f * up.float()
    d_weights = (dh.float() * h).sum(1)
    weighted = dh.float() * weights[:, None]
    parts = [weighted * slope] if up is None else [weighted * up.float() * slope, weighted * f]
    codes = to_codes(h * (1 / scale), format_named("e4m3"))  # exact: a power of two
    return torch.cat(parts, dim=1).to(dh.dtype), codes, d_weights
