"""A float64 GEMM that reads codes and scales by itself, and the operands to try it with."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.numerics import Quantized

TWIN = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2, torch.int8: np.int8}


def values(x: Quantized) -> np.ndarray:
    """Return codes * scale in float64: the codes by ml_dtypes, each scale repeated over its tile."""
    rows, cols = x.codes.shape
    height, width = x.granularity.rows or rows, x.granularity.cols or cols
    codes = x.codes.cpu().contiguous().view(torch.uint8).numpy().view(TWIN[x.codes.dtype]).astype(np.float64)
    scale = x.scale.cpu().double().numpy().repeat(height, 0).repeat(width, 1)[:rows, :cols]
    return codes * scale


def float64_gemm(a: Quantized, b: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a . b^T and |a| . |b|^T, which any bound on rounding is a multiple of."""
    left, right = values(a), values(b)
    return torch.from_numpy(left @ right.T), torch.from_numpy(np.abs(left) @ np.abs(right).T)


@pytest.fixture
def oracle() -> Callable[[Quantized, Quantized], tuple[torch.Tensor, torch.Tensor]]:
    return float64_gemm
