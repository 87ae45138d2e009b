"""Octavo's own GEMM in Triton: of INT8 bit for bit the exact sums times the scales, in ragged sizes; of FP8 as well."""

import pytest
import torch

from octavo.kernels.gemm.integer import gemm as contract
from octavo.kernels.gemm.reference import gemm as reference
from octavo.numerics import PER_ROW, PER_TENSOR, Quantized

gemm = pytest.importorskip("octavo.kernels.gemm.triton")
triton, tl = gemm.triton, gemm.tl
SMALL = gemm.Config(32, 32, 32, warps=4, stages=3)


def operands(m: int, n: int, k: int, device: str) -> tuple[Quantized, Quantized]:
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    return Quantized(a, torch.rand(m, 1, device=device), PER_ROW), Quantized(
        b, torch.rand(n, 1, device=device), PER_ROW
    )


def exact(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    sums = (a.codes.cpu().double() @ b.codes.cpu().double().t()).float().to(a.scale.device)
    return (sums * a.scale * b.scale.t()).to(dtype)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_the_exact_sums_times_the_scales(dtype, parts, device):
    a, b = operands(70, 48, 80, device)
    config = SMALL._replace(parts=parts) if device == "cpu" else gemm.CONFIG._replace(parts=parts)
    y = gemm.scaled_gemm(a.codes, a.scale, b.codes, b.scale, dtype, config=config)
    assert torch.equal(y, exact(a, b, dtype))
    assert torch.equal(reference(a, b, dtype), exact(a, b, dtype))


@pytest.mark.parametrize("fast", [False, True])
def test_the_same_kernel_multiplies_fp8(fast, device):
    """Sums of small whole numbers are exact with any accumulator."""
    (a, b), dtype = operands(70, 48, 80, device), torch.bfloat16
    a, b = (Quantized((x.codes % 5).to(torch.float8_e4m3fn), x.scale, PER_ROW) for x in (a, b))
    config = SMALL if device == "cpu" else None
    y = gemm.scaled_gemm(a.codes, a.scale, b.codes, b.scale, dtype, fast=fast, config=config)
    sums = (a.codes.float().double() @ b.codes.float().double().t()).float()
    assert torch.equal(y, (sums * a.scale * b.scale.t()).to(dtype))


@triton.jit
def _store_halved(scaled, y, row, col):
    y.store([row, col], scaled * tl.full((), 0.5, tl.float32))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_function_stores_the_result(parts, device):
    a, b = operands(70, 48, 80, device)
    config = SMALL._replace(parts=parts) if device == "cpu" else gemm.CONFIG._replace(parts=parts)
    arguments = a.codes, a.scale, b.codes, b.scale, torch.float32
    y = gemm.scaled_gemm(*arguments, epilogue=_store_halved, config=config)
    assert torch.equal(y, exact(a, b, torch.float32) / 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 33, 130), (129, 513, 4096), (2048, 768, 384), (5, 64, 20_000)], ids=str
)
def test_any_size_on_a_gpu(m, n, k, device):
    a, b = operands(m, n, k, device)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(contract(a, b, dtype, False), exact(a, b, dtype))
    whole = Quantized(a.codes, a.scale[:1].contiguous(), PER_TENSOR)
    assert torch.equal(contract(whole, b, torch.bfloat16, False), exact(whole, b, torch.bfloat16))
