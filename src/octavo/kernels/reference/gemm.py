"""Reference GEMM: dequantise, multiply and accumulate in FP32, round once; in FP64 for INT8, whose sums are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.product import rounded_product
from octavo.kernels.reference.accumulator import exact
from octavo.numerics import Quantized, dequantize


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Return a . b^T for a (M, K), b (N, K), any granularity, as (M, N) of `out_dtype`."""
    if a.codes.dtype == torch.int8:
        return exact(a, b, out_dtype)
    return rounded_product(dequantize(a), dequantize(b).t(), out_dtype)
