"""Reference GEMM: dequantise, multiply and accumulate in FP32, round once. Sums of INT8 are exact.

An integer sum is rounded to FP32, multiplied by the scale of a, then by that of b, and rounded to the output dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.product import product, rounded_product
from octavo.numerics import INT8, Quantized, dequantize

EXACT = 2**24 // int(INT8.max) ** 2
"""Largest K whose sums of INT8 products are exact in FP32, which holds integers up to 2^24."""


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Return a . b^T for a (M, K), b (N, K), any granularity, as (M, N) of `out_dtype`."""
    if a.codes.dtype == b.codes.dtype == torch.int8 and a.granularity.cols is b.granularity.cols is None:
        scales = (x.granularity.expand(x.scale, x.codes.shape[0], 1) for x in (a, b))
        return (integer_sums(a.codes, b.codes) * next(scales) * next(scales).t()).to(out_dtype)
    return rounded_product(dequantize(a), dequantize(b).t(), out_dtype)


def integer_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return a . b^T of INT8 codes (M, K) and (N, K), (M, N): the exact sums, rounded once to FP32."""
    if a.is_cuda:  # products of FP32 may be computed in TF32 there
        return product(a.double(), b.double().t()).float()
    pieces = zip(a.split(EXACT, dim=1), b.split(EXACT, dim=1), strict=True)
    sums = [product(left.float(), right.float().t()) for left, right in pieces]
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).double().sum(0).float()  # integers below 2^53
