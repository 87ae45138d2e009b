"""The quantise contract: the specification's codes, laid out as a GEMM reads them."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError
from octavo.numerics import format_named, granularity_named
from octavo.numerics import quantize as specified

GRANULARITIES = ["tensor", "row", "column", "1x128", "128x128", "1x32", "128x1"]


def uint8(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.covering(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scaling", ["power_of_two", "float32", "engine"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_codes_are_those_of_the_specification_and_contiguous(fmt, granularity, scaling, rounding, transposed):
    x = torch.randn(130, 140)
    x = x.t() if transposed else x
    quantized = kernels.quantize(x, fmt, granularity, scaling, rounding, seed=3)
    expected = specified(x, format_named(fmt), granularity_named(granularity), scaling, rounding, 3)
    assert torch.equal(uint8(quantized.codes), uint8(expected.codes.contiguous()))
    assert torch.equal(quantized.scale, expected.scale)
    assert quantized.granularity == expected.granularity
    assert quantized.codes.is_contiguous()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_transpose_moves_bytes_and_rounds_nothing(granularity):
    quantized = kernels.quantize(torch.randn(70, 130), "e4m3", granularity)
    transposed = kernels.contiguous(quantized.t())
    assert transposed.codes.is_contiguous()
    assert torch.equal(uint8(transposed.codes), uint8(quantized.codes.t().contiguous()))
    assert torch.equal(transposed.scale, quantized.scale.t())


def test_unknown_names():
    x = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="unknown format 'e4m4'"):
        kernels.quantize(x, "e4m4", "row")
    with pytest.raises(ConfigError, match="unknown granularity 'rows'"):
        kernels.quantize(x, "e4m3", "rows")
    with pytest.raises(ConfigError, match="unknown scaling 'pow2'"):
        kernels.quantize(x, "e4m3", "row", "pow2")
    with pytest.raises(ConfigError, match="takes a matrix"):
        kernels.quantize(x[0], "e4m3", "row")
