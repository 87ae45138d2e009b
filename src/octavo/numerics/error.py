"""What quantisation did to a tensor: signal to noise, the angle, how much of the format's range was used or missed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.numerics.formats import format_of
from octavo.numerics.quantize import Quantized, dequantize


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal to quantisation noise ratio of the whole tensor, in dB; infinite where they are equal."""
    return _decibel(reference.double().square().sum(), _noise(reference, approximation).sum()).item()


def sqnr_per_row_db(reference: Tensor, approximation: Tensor) -> Tensor:
    """Return the ratio of each row of an (R, C) matrix, float64 (R,), in dB.

    A global figure hides a ruined row behind one loud row; this does not.
    """
    return _decibel(reference.double().square().sum(dim=-1), _noise(reference, approximation).sum(dim=-1))


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return [a . b, a . a, b . b] of two tensors of one shape as vectors, float64 (3,); of parts they add up."""
    a, b = a.double(), b.double()
    return torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])


def cosine_of(products: Tensor) -> float:
    """Return the cosine between two vectors of these `inner_products`; 1 where both are zero, 0 where one is."""
    ab, aa, bb = products.tolist()
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(ab + (aa == bb))  # a . b is 0 then, or NaN


def kurtosis(x: Tensor) -> float:
    """Return E[(x - mean)^4] / var^2: 3 for normal data; it rises long before outliers do harm (arXiv 2505.20524)."""
    centred = x.double() - x.double().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """The error measures of one quantised matrix. Fractions count the finite, non-zero elements."""

    sqnr_db: float
    worst_row_sqnr_db: float
    flushed: float
    """Fraction that became zero."""
    subnormal: float
    """Fraction whose code is subnormal, so that it has lost mantissa bits."""
    saturated: float
    """Fraction beyond the format's range that was clamped to its end."""
    nonfinite: int
    """Count of NaN and infinities."""
    kurtosis: float


def measure(x: Tensor, quantized: Quantized) -> ErrorReport:
    """Compare an (R, C) matrix with its quantised form."""
    fmt = format_of(quantized.codes)
    finite = x.isfinite()
    codes = quantized.codes.double().abs()
    counted = finite & (x != 0)
    count = max(int(counted.sum()), 1)
    limit = (
        quantized.granularity.expand(quantized.scale, *x.shape).double() * fmt.max * (1 + 2.0**-20)
    )  # its own rounding aside
    clean = torch.where(finite, x.double(), 0.0)
    restored = torch.where(finite, dequantize(quantized).double(), 0.0)
    return ErrorReport(
        sqnr_db=sqnr_db(clean, restored),
        worst_row_sqnr_db=float(sqnr_per_row_db(clean, restored).min()),
        flushed=int((counted & (codes == 0)).sum()) / count,
        subnormal=int((counted & (codes > 0) & (codes < fmt.smallest_normal)).sum()) / count,
        saturated=int((counted & (x.double().abs() > limit)).sum()) / count,
        nonfinite=int((~finite).sum()),
        kurtosis=kurtosis(x[finite]),
    )


def _noise(reference: Tensor, approximation: Tensor) -> Tensor:
    return (reference.double() - approximation.double()).square()


def _decibel(signal: Tensor, noise: Tensor) -> Tensor:
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))
