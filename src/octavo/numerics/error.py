"""Error measures of quantisation: signal-to-noise ratio, and cosine."""

from __future__ import annotations

import torch
from torch import Tensor


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio of the whole tensor, in dB; infinite if they are equal."""
    return _decibel(reference.double().square().sum(), _noise(reference, approximation).sum()).item()


def sqnr_per_row_db(reference: Tensor, approximation: Tensor) -> Tensor:
    """Return the ratio of each row of an (R, C) matrix, float64 (R,), in dB.

    A ratio of the whole tensor hides a ruined row behind a row of large values; this one does not.
    """
    return _decibel(reference.double().square().sum(dim=-1), _noise(reference, approximation).sum(dim=-1))


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Return [a . b, a . a, b . b] of two tensors of one shape as vectors, float64 (3,); those of parts add up."""
    a, b = a.double(), b.double()
    return torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()])


def cosine_of(products: Tensor) -> float:
    """Return the cosine between two vectors of these `inner_products`; 1 if both are zero, 0 if one is."""
    ab, aa, bb = products.tolist()
    return float(ab / (aa * bb) ** 0.5) if aa and bb else float(ab + (aa == bb))  # a . b is 0 then, or NaN


def _noise(reference: Tensor, approximation: Tensor) -> Tensor:
    return (reference.double() - approximation.double()).square()


def _decibel(signal: Tensor, noise: Tensor) -> Tensor:
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))
