"""Rotations against their definition as a matrix, and INT8 against a float64 rounding of its own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics import (
    BLOCKS,
    E4M3,
    INT8,
    PER_ROW,
    PER_TENSOR,
    SYLVESTER,
    dequantize,
    quantize,
    rotate,
    sqnr_db,
    to_codes,
)
from octavo.numerics.rotation import block_for, hadamard

every_block = pytest.mark.parametrize("block", [*BLOCKS, *(-size for size in SYLVESTER)])


@pytest.mark.parametrize("block", BLOCKS)
def test_the_matrix_is_orthogonal_symmetric_and_regular(block):
    h = hadamard(block)
    assert torch.equal(h @ h, torch.eye(block, dtype=torch.float64)) and torch.equal(h, h.t())
    assert bool((h.abs() == block**-0.5).all())
    assert torch.equal(h.sum(0), torch.ones(block, dtype=torch.float64))  # no row is constant but for block 1


@pytest.mark.parametrize("size", SYLVESTER)
def test_sylvesters_matrix_is_orthogonal_symmetric_and_gathers_a_mean(size):
    h = hadamard(-size)
    torch.testing.assert_close(h @ h, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(h, h.t()) and bool((h.abs() == size**-0.5).all())
    assert torch.equal(h.sum(0).abs() > 1e-9, torch.arange(size) == 0)  # one row is constant


@every_block
def test_a_rotation_is_the_product_with_the_matrix(block):
    own, block = block, abs(block)
    x = torch.randn(5, 2 * block) * torch.exp(3 * torch.randn(5, 2 * block))
    exact = (x.double().view(5, 2, block) @ hadamard(own)).view(5, -1)
    bound = (
        2.0**-22 * np.log2(block) * x.abs().view(5, 2, block).sum(2, keepdim=True).expand(5, 2, block).reshape(5, -1)
    )
    assert bool(((rotate(x, own) - exact).abs() <= bound * block**-0.5 * 2).all())
    assert sqnr_db(x, rotate(rotate(x, own), own)) > 120


def test_values_of_one_sign_and_small_integers_are_rotated_without_rounding():
    x = torch.randint(-64, 65, (3, 256)).float()
    assert torch.equal(rotate(x, 256).double(), x.double() @ hadamard(256))


def test_a_mean_and_an_outlier_spread():
    mean, outlier = torch.ones(1, 256), torch.zeros(1, 256)
    outlier[0, 17] = 16.0
    assert torch.equal(rotate(mean, 256), mean)  # a regular matrix keeps it, Sylvester's would put it into one value
    assert torch.equal(rotate(outlier, 256).abs(), mean)


def test_sizes_of_blocks():
    assert [block_for(cols, 256) for cols in (4096, 384, 1408, 112, 68, 102, 0)] == [256, 64, 64, 16, 4, 1, 256]
    assert block_for(4096, 64) == 64 and block_for(4096, 0) == 1
    assert [block_for(cols, -256) for cols in (4096, 384, 1408, 112, 68, 102)] == [-256, -128, -128, -16, -4, 1]
    with pytest.raises(ConfigError, match="blocks of -256 does not fit rows of 384"):
        rotate(torch.zeros(1, 384), -256)
    with pytest.raises(ConfigError, match="blocks of -2 "):
        rotate(torch.zeros(1, 384), -2)
    with pytest.raises(ConfigError, match="blocks of 256 does not fit rows of 384"):
        rotate(torch.zeros(1, 384), 256)
    with pytest.raises(ConfigError, match="blocks of 128"):
        rotate(torch.zeros(1, 128), 128)


@pytest.mark.parametrize("granularity", [PER_ROW, PER_TENSOR], ids=lambda g: g.name)
@pytest.mark.parametrize("scaling", ["float32", "power_of_two"])
def test_int8_is_the_nearest_integer_of_the_scaled_value(scaling, granularity):
    x = torch.randn(20, 48) * torch.exp(torch.randn(20, 1))
    x[3] = 0.0
    quantized = quantize(x, INT8, granularity, scaling)
    amax = x.abs().amax(1, keepdim=True) if granularity == PER_ROW else x.abs().amax().reshape(1, 1)
    ratio = amax.double() / 127
    expected = torch.exp2(torch.ceil(torch.log2(ratio))) if scaling == "power_of_two" else ratio.float().double()
    expected = torch.where(amax == 0, 2.0**-126, expected)
    assert torch.equal(quantized.scale.double(), expected)
    inverse = (127 / amax.double()).float() if scaling == "float32" else (1 / expected).float()
    inverse = torch.where(amax == 0, 1.0, inverse)
    assert torch.equal(quantized.codes.double(), torch.from_numpy(np.rint((x * inverse).double().numpy())))
    assert quantized.codes.abs().max() == 127 if scaling == "float32" else quantized.codes.abs().max() >= 63


def test_int8_rounds_ties_to_even_and_saturates_symmetrically():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 500.0, -500.0, torch.nan, torch.inf])
    assert to_codes(x, INT8).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127, 0, 0]


@pytest.mark.parametrize("rotation", [0, 16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rule_3_a_row_with_what_is_not_finite_is_nan_and_no_other(bad, rotation):
    x = torch.randn(6, 32)
    clean = quantize(x, INT8, PER_ROW, "float32", rotation=rotation)
    x[4, 9] = bad
    quantized = quantize(x, INT8, PER_ROW, "float32", rotation=rotation)
    values = dequantize(quantized)
    assert bool(values[4].isnan().all()) and not quantized.codes[4].any()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(values[others], dequantize(clean)[others])


@settings(max_examples=50, deadline=None)
@given(st.integers(-60, 60), st.sampled_from([0, 4, 64]))
def test_rule_2_codes_do_not_depend_on_the_magnitude(exponent, rotation):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(exponent + 100))
    one, other = (quantize(y, INT8, PER_ROW, "power_of_two", rotation=rotation) for y in (x, x * 2.0**exponent))
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scale * 2.0**exponent, other.scale)


def test_a_ninth_of_the_variance_of_e4m3_whatever_the_outliers():
    x, w = torch.randn(64, 1024), torch.randn(64, 1024)
    x[:, ::64] *= 60
    errors = {}
    for name, fmt, scaling, rotation in (
        ("e4m3", E4M3, "power_of_two", 0), ("int8", INT8, "float32", 0), ("rotated", INT8, "float32", 256)
    ):  # fmt: skip
        a, b = (dequantize(quantize(m, fmt, PER_ROW, scaling, rotation=rotation)).double() for m in (x, w))
        errors[name] = ((a @ b.t()) - x.double() @ w.double().t()).square().sum()
    assert errors["rotated"] < 0.125 * errors["e4m3"] < 0.125 * errors["int8"]


def test_decode_is_the_cast():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(INT8.decode(codes), codes.view(torch.int8).double())
    assert (INT8.max, INT8.smallest_subnormal, INT8.is_integer, E4M3.is_integer) == (127.0, 1.0, True, False)
