"""Reference RMS norm and layer norm, forward and backward, in FP32.

Backward, with the normalised row n = (x - mean) * rstd, mean = 0 for an RMS norm, and g = dy * weight:

    dx = rstd * (g - n * mean(g n) - mean(g))      the last term for a layer norm only
    dweight = sum over rows of dy * n              dbias = sum over rows of dy

If x has other readers, such as the next residual sum, their gradient is added to the rounded dx, as autograd does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import Quantized, dequantize, quantize


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: QuantSpec | None,
    centred: bool,
    second: QuantSpec | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Quantized | None, Tensor, Tensor | None, Quantized | None, Tensor | None]:
    """Return y, its codes, rstd, mean, the second codes and the sum. See `octavo.kernels.norm`. centred: layer norm.

    With an addend the sum is x + addend as PyTorch rounds it, and the rest is of it; without one it is None.
    """
    total = None if addend is None else x + addend
    x = x if total is None else total
    s = x.float()
    mean = s.mean(dim=1) if centred else None
    if mean is not None:
        s = s - mean[:, None]
    rstd = torch.rsqrt((s * s).mean(dim=1) + eps)
    y = s * rstd[:, None]
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    quantized, others = (
        None if spec is None else quantize(y, spec.fmt, spec.tile, spec.scaling, rotation=spec.rotation)
        for spec in (target, second)
    )
    return y.to(x.dtype), quantized, rstd, mean, others, total


def backward(
    dy: Tensor,
    x: Tensor | Quantized,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    passing: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias in the dtypes of x, weight and bias. See `octavo.kernels.norm`."""
    dtype, s = (x.dtype, x.float()) if isinstance(x, Tensor) else (dy.dtype, dequantize(x))
    dy = dy.float()
    normed = (s if mean is None else s - mean[:, None]) * rstd[:, None]
    g = dy if weight is None else dy * weight.float()
    dx = g - normed * (g * normed).mean(dim=1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(dim=1, keepdim=True)
    dx = dx * rstd[:, None]
    dweight = None if weight is None else (dy * normed).sum(dim=0).to(weight.dtype)
    dbias = None if bias is None else dy.sum(dim=0).to(bias.dtype)
    dx = dx.to(dtype)
    return dx if passing is None else (dx + passing).to(dtype), dweight, dbias
