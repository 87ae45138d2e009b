"""The reference GEMM is the definition: values back, multiply, add."""

import pytest
import torch

from octavo.kernels.gemm.reference import gemm
from octavo.numerics import PER_COLUMN, PER_ROW, PER_TENSOR, Quantized, TILE_1x128


def matrix(rows: list[list[float]], scale: list[list[float]], granularity, dtype=torch.float8_e4m3fn) -> Quantized:
    return Quantized(torch.tensor(rows).to(dtype), torch.tensor(scale), granularity)


def test_worked_out_by_hand():
    a = matrix([[1.0, 2.0], [3.0, -4.0]], [[2.0], [0.5]], PER_ROW)  # 2 4 / 1.5 -2
    b = matrix([[1.0, 1.0], [0.0, 2.0], [-1.0, 0.5]], [[10.0]], PER_TENSOR)  # 10 10 / 0 20 / -10 5
    assert gemm(a, b, torch.float32).tolist() == [[60.0, 80.0, 0.0], [-5.0, -40.0, -25.0]]


def test_scales_along_the_sum():
    a = matrix([[1.0, 1.0]], [[1.0, 100.0]], PER_COLUMN)
    b = matrix([[3.0, 5.0]], [[1.0]], PER_ROW, torch.float8_e5m2)
    assert gemm(a, b, torch.float32).item() == 503.0


def test_ragged_tiles():
    a = Quantized(torch.ones(1, 130).to(torch.float8_e4m3fn), torch.tensor([[1.0, 1000.0]]), TILE_1x128)
    assert gemm(a, a, torch.float32).item() == 128 + 2e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounds_once_at_the_end(dtype):
    a = Quantized(torch.ones(1, 257).to(torch.float8_e4m3fn), torch.ones(1, 1), PER_TENSOR)
    y = gemm(a, a, dtype)
    assert y.dtype == dtype
    assert y.item() == torch.tensor(257.0).to(dtype).item()  # in BF16, adding ones one by one would stop at 256
