"""Reference activations of an MLP in FP32: h = f(gate) * up, its gradients, and their codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize.reference import quantize_pair
from octavo.numerics import PER_COLUMN, Quantized, dequantize
from octavo.numerics.quantize import to_codes


def activate(
    kind: str,
    gate: Tensor,
    up: Tensor | None,
    target: QuantSpec,
    inputs: QuantSpec | None = None,
    second: QuantSpec | None = None,
) -> list[Any]:
    """See `octavo.kernels.activation.activate`: h, gate and up if there are `inputs`, and the scales of `second`."""
    h = _hidden(kind, gate, up)
    kept = [quantize_pair([x], inputs, None)[0] for x in (gate, up) if x is not None and inputs is not None]
    rows = quantize_pair([h], second, None)[0]
    return [quantize_pair([h], target, None)[0], *kept, rows and rows.scale]


def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """See `octavo.kernels.activation.activation_backward`."""
    (rows, columns, hidden), (row_fold, column_fold, hidden_scale) = targets, factors
    gate, up = _values(gate), None if up is None else _values(up)
    gradients = [d for d in _gradients(kind, dh, gate, up) if d is not None]
    h_t = None
    if hidden is not None and hidden_scale is not None:
        codes = to_codes(_hidden(kind, gate, up) * (1 / hidden_scale), hidden.fmt)
        h_t = Quantized(codes.t().contiguous(), hidden_scale.reshape(1, -1).clone(), PER_COLUMN)
    elif hidden is not None:
        _, h_t = quantize_pair([_hidden(kind, gate, up)], None, hidden)
    return *quantize_pair(gradients, rows, columns, row_fold, column_fold), h_t


def activate_plain(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """See `octavo.kernels.activation.activate_plain`."""
    return _hidden(kind, gate, up).to(gate.dtype).contiguous()


def activation_backward_plain(kind: str, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """See `octavo.kernels.activation.activation_backward_plain`."""
    d_gate, d_up = _gradients(kind, dh, gate, up)
    return d_gate.to(dh.dtype), None if d_up is None else d_up.to(dh.dtype)


def value(kind: str, x: Tensor) -> Tensor:
    """Return f(x) for an FP32 tensor."""
    return value_and_slope(kind, x)[0]


def value_and_slope(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x) and f'(x) for an FP32 tensor.

    | kind        | f(x)                                                          |
    |-------------|---------------------------------------------------------------|
    | `silu`      | x * sigmoid(x)                                                |
    | `gelu`      | x * (1 + erf(x / sqrt(2))) / 2                                |
    | `gelu_tanh` | x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))            |
    | `relu2`     | max(x, 0)^2                                                   |

    `gelu_tanh` equals the usual formula, as (1 + tanh(u)) / 2 = sigmoid(2 u).
    """
    if kind == "silu":
        share = 1 / (1 + torch.exp(-x))
        f = x * share
        return f, share + f * (1 - share)
    if kind == "gelu":
        share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * share, share + x * (torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    if kind == "gelu_tanh":
        steepness = 2 * math.sqrt(2 / math.pi)
        share = 1 / (1 + torch.exp(-steepness * x * (1 + 0.044715 * x * x)))
        f = x * share
        return f, share + f * (1 - share) * (steepness * (1 + 3 * 0.044715 * x * x))
    positive = torch.where(x <= 0, 0.0, x)  # preserves NaN
    return positive * positive, 2 * positive


def _values(x: Tensor | Quantized) -> Tensor:
    return x if isinstance(x, Tensor) else dequantize(x)


def _hidden(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    h = value(kind, gate.float())
    return h if up is None else h * up.float()


def _gradients(kind: str, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return d gate and d up, FP32."""
    f, slope = value_and_slope(kind, gate.float())
    dh = dh.float()
    return (dh * slope, None) if up is None else (dh * up.float() * slope, dh * f)
