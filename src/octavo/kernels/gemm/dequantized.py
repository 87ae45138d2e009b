"""MXFP8 on hardware without MXFP8: dequantise to BF16, and multiply with FP32 accumulation.

Equal, up to the order of summation, to tensor cores that read 1x32 scales (Blackwell, OCP MX 1.0): an E4M3 or E5M2
value times a power of two is exact in BF16 down to 2^-133, its smallest subnormal. It takes the time of a BF16 GEMM
plus the dequantising pass. It takes 1x32 operands only: for all others it would hide that a fast kernel is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.product import rounded_product
from octavo.numerics import GROUP_1x32, Quantized, dequantize


def unsupported_reason(a: Quantized, b: Quantized) -> str | None:
    """Return why these operands are not emulated, or None."""
    if (a.granularity, b.granularity) != (GROUP_1x32, GROUP_1x32):
        return "it emulates 1x32 by 1x32 scales only"
    return None


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T for a (M, K), b (N, K), one power-of-two scale per 32 values along K.

    `fast` is ignored: there is no such accumulator to emulate.
    """
    return rounded_product(dequantize(a, torch.bfloat16), dequantize(b, torch.bfloat16).t(), out_dtype)
