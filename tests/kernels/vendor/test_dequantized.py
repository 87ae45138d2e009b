"""MXFP8 emulated: the product of the values that the codes stand for, and of no others."""

import pytest
import torch

from octavo import kernels
from octavo.kernels.gemm import dequantized
from octavo.numerics import E4M3, E5M2, PER_ROW, GROUP_1x32, dequantize, quantize

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def group_quantised_in_float64(x: torch.Tensor) -> torch.Tensor:
    """Groups of 32 with a shared power of two, by float64 arithmetic: no code of ours but E4M3's list of values."""
    values = E4M3.decode(torch.arange(256, dtype=torch.uint8))
    values = values[values.isfinite()].sort().values
    groups = x.double().reshape(x.shape[0], -1, 32)
    scale = torch.exp2((groups.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    nearest = (groups / scale)[..., None].sub(values).abs().argmin(-1)
    return (values[nearest] * scale).reshape(x.shape)


@pytest.mark.parametrize("device", DEVICES)
def test_against_a_float64_oracle(device):
    a, b = (torch.randn(n, 96) * torch.exp(2 * torch.randn(n, 1)) for n in (24, 40))
    exact = group_quantised_in_float64(a) @ group_quantised_in_float64(b).t()
    magnitude = group_quantised_in_float64(a).abs() @ group_quantised_in_float64(b).abs().t()
    x, y = (kernels.quantize(t.to(device), "e4m3", "1x32") for t in (a, b))
    with kernels.record() as ledger:
        got = kernels.gemm(x, y, torch.float32)
    assert ledger.gemms == {"emulated.1x32": 1} and not ledger.fallbacks
    assert bool(((got.double().cpu() - exact).abs() <= 2.0**-23 * 99 * magnitude).all())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_values_are_exact_in_bf16(fmt):
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    values = fmt.decode(codes)
    x = quantize(values.nan_to_num(0, 0, 0).float(), fmt, GROUP_1x32)
    for exponent in (-100, -7, 0, 60):
        scaled = x._replace(scale=x.scale * 2.0**exponent)
        assert torch.equal(dequantize(scaled, torch.bfloat16).double(), dequantize(scaled).double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_output_and_ragged_shapes(dtype, device):
    a, b = (kernels.quantize(torch.randn(n, 70, device=device), "e4m3", "1x32") for n in (5, 33))
    y = kernels.gemm(a, b, dtype)
    assert y.dtype == dtype and y.shape == (5, 33)
    assert torch.allclose(y.double(), dequantize(a).double() @ dequantize(b).double().t(), rtol=1e-2, atol=1e-2)


def test_nothing_else_is_emulated():
    group, row = (quantize(torch.ones(32, 32), E4M3, tile) for tile in (GROUP_1x32, PER_ROW))
    assert dequantized.unsupported_reason(group, group) is None
    for pair in ((group, row), (row, group), (row, row)):
        assert dequantized.unsupported_reason(*pair) == "it emulates 1x32 by 1x32 scales only"
