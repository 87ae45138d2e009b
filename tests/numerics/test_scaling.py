"""Scales against exact rational arithmetic, down to where FP32 ends."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics import E4M3, E5M2, PER_ROW, PER_TENSOR, dequantize, from_e8m0, quantize, scale_from_amax, to_e8m0

FORMATS = [E4M3, E5M2]
SMALLEST = Fraction(1, 2**126)
LARGEST_FP32 = float(np.finfo(np.float32).max)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
every_scaling = pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
positive_fp32 = st.floats(min_value=2.0**-149, max_value=LARGEST_FP32, width=32, allow_nan=False)


def scale_of(amax: float, fmt, scaling: str) -> tuple[Fraction, Fraction]:
    scale, inverse = scale_from_amax(torch.tensor([amax], dtype=torch.float32), fmt, scaling)
    assert scale.dtype == inverse.dtype == torch.float32
    return Fraction(scale.item()), Fraction(inverse.item())


def nearest_fp32(x: Fraction) -> Fraction:
    """Return the FP32 value nearest to x > 0, ties to even, by looking at the neighbours of an approximation."""
    start = np.float32(float(x))
    candidates = [np.nextafter(start, np.float32(0)), start, np.nextafter(start, np.float32(np.inf))]
    return Fraction(float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1))))


@every_format
@given(amax=positive_fp32)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_power_of_two_is_the_smallest_that_holds_amax(fmt, amax):
    scale, inverse = scale_of(amax, fmt, "power_of_two")
    assert scale * inverse == 1
    assert scale.numerator == 1 or scale.denominator == 1
    assert (scale.numerator * scale.denominator).bit_count() == 1, "one bit: a power of two"
    assert Fraction(amax) <= scale * Fraction(fmt.max)
    assert scale == SMALLEST or Fraction(amax) > scale / 2 * Fraction(fmt.max), "half of it would saturate"


@every_format
def test_power_of_two_at_and_beside_every_power(fmt):
    # fmt.max * 2^k is where the exponent steps up: exactly there it must not, one FP32 step above it must.
    for k in range(-126, 127):
        edge = fmt.max * 2.0**k
        if not 2.0**-126 * fmt.max <= edge < LARGEST_FP32:
            continue
        above = float(np.nextafter(np.float32(edge), np.float32(np.inf)))
        assert scale_of(edge, fmt, "power_of_two")[0] == Fraction(2.0**k)
        assert scale_of(above, fmt, "power_of_two")[0] == Fraction(2.0 ** (k + 1))


@every_format
@given(amax=positive_fp32)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_float32_is_the_quotient_rounded_once(fmt, amax):
    scale, inverse = scale_of(amax, fmt, "float32")
    exact = Fraction(amax) / Fraction(fmt.max)
    assert scale == max(nearest_fp32(exact), SMALLEST)
    assert inverse == nearest_fp32(min(1 / exact, 1 / SMALLEST))


@every_format
@given(amax=positive_fp32)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_engine_is_the_quotient_with_a_floor_and_the_reciprocal_of_it(fmt, amax):
    scale, inverse = scale_of(amax, fmt, "engine")
    assert scale == nearest_fp32(max(Fraction(amax) / Fraction(fmt.max), 1 / (512 * Fraction(fmt.max))))
    assert inverse == nearest_fp32(1 / scale)
    assert scale_of(0.0, fmt, "engine")[0] == nearest_fp32(1 / (512 * Fraction(fmt.max)))


@every_format
@every_scaling
@given(pair=st.tuples(positive_fp32, positive_fp32))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_scale_is_monotone_in_amax(fmt, scaling, pair):
    low, high = (scale_of(amax, fmt, scaling) for amax in sorted(pair))
    assert low[0] <= high[0] and low[1] >= high[1]


@every_format
@every_scaling
def test_rule_1_scale_is_what_a_code_is_multiplied_by(fmt, scaling):
    x = torch.tensor([[fmt.max * 4.0, -fmt.max, fmt.max / 2]])
    quantized = quantize(x, fmt, PER_ROW, scaling)
    assert quantized.scale.item() == 4.0  # amax / format max, not its reciprocal
    assert torch.equal(quantized.codes.float() * quantized.scale, x)
    assert torch.equal(dequantize(quantized), x)


@every_format
def test_rule_1_power_of_two_rounds_the_exponent_up(fmt):
    for amax, expected in [(fmt.max, 1.0), (fmt.max * 1.001, 2.0), (fmt.max * 1.999, 2.0), (fmt.max * 0.501, 1.0)]:
        assert scale_of(float(np.float32(amax)), fmt, "power_of_two")[0] == expected


@every_format
@every_scaling
def test_rule_2_amax_zero_gives_the_smallest_scale_and_zero_codes(fmt, scaling):
    # Not 1: folded into a gradient, a scale of 1 beside ones of 2^-12 would outweigh every row that is not zero.
    assert scale_of(0.0, fmt, scaling) == (SMALLEST, 1 / SMALLEST)
    quantized = quantize(torch.zeros(3, 5), fmt, PER_ROW, scaling)
    assert torch.equal(quantized.scale, torch.full((3, 1), float(SMALLEST)))
    assert torch.equal(quantized.codes.view(torch.uint8), torch.zeros(3, 5, dtype=torch.uint8))


@every_format
@every_scaling
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_rule_2_no_floor_so_quantise_is_scale_invariant(fmt, scaling, data):
    """Q(2^-k x) = 2^-k Q(x): same codes, scale moved by 2^-k, until the scale would pass 2^-126, where FP32 ends."""
    values = data.draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8))
    x = torch.tensor([values])
    x = torch.where(x.abs() < 2.0**-60, 0.0, x)  # start well above where scales end
    quantized = quantize(x, fmt, PER_TENSOR, scaling)
    is_zero = bool((x == 0).all())
    room = 60 if is_zero else int(torch.log2(quantized.scale).floor()) + 126  # how far the scale can still move down
    k = data.draw(st.integers(-60, room))
    moved = x * 2.0**-k
    if not torch.equal(moved * 2.0**k, x):
        return  # an element became subnormal in FP32 and lost bits: then it is another matrix
    again = quantize(moved, fmt, PER_TENSOR, scaling)
    if is_zero:
        assert again.scale.item() == SMALLEST
    else:
        assert again.scale.item() == quantized.scale.item() * 2.0**-k
    assert torch.equal(again.codes.view(torch.uint8), quantized.codes.view(torch.uint8))


@every_format
@every_scaling
def test_rule_2_reaches_down_to_the_end_of_fp32(fmt, scaling):
    x = torch.tensor([[1.0, -0.75, 0.3]])
    reference = quantize(x, fmt, PER_ROW, scaling)
    lowest = int(torch.log2(reference.scale).floor()) + 126
    deep = quantize(x * 2.0**-lowest, fmt, PER_ROW, scaling)
    assert deep.scale.item() < 2.0**-125  # the last binade that has scales
    assert torch.equal(deep.codes.view(torch.uint8), reference.codes.view(torch.uint8))


@every_format
@every_scaling
def test_below_the_end_of_fp32_values_flush_instead_of_dividing_by_zero(fmt, scaling):
    for amax in (2.0**-149, 2.0**-140, 2.0**-127):
        assert scale_of(amax, fmt, scaling) == (SMALLEST, 1 / SMALLEST)
    x = torch.tensor([[2.0**-149, -(2.0**-128)]])
    restored = dequantize(quantize(x, fmt, PER_ROW, scaling))
    assert bool(((restored - x).abs() <= fmt.smallest_subnormal * 2.0**-127).all()), (
        "half a subnormal step of scale 2^-126"
    )


@every_format
@every_scaling
def test_large_values_do_not_overflow(fmt, scaling):
    # 1.75 * 2^127 is the largest that both formats hold; halfway from there to 2^128 and beyond, FP8 rounds to 2^128,
    # which FP32 does not have.
    large = 1.75 * 2.0**127
    x = torch.tensor([[large, -1.0]])
    restored = dequantize(quantize(x, fmt, PER_ROW, scaling))
    assert restored[0, 0].item() == pytest.approx(large, rel=2.0**-23)  # FP32 scales: one rounding of the product


def test_unknown_scaling_says_what_was_meant():
    with pytest.raises(ConfigError, match=r"Did you mean 'power_of_two'\? Scalings: power_of_two, float32"):
        scale_from_amax(torch.ones(1), E4M3, "power_of_to")


def test_e8m0_decodes_as_in_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(from_e8m0(torch.from_numpy(codes)).numpy(), expected)


def test_every_scale_survives_e8m0():
    exponents = range(-126, 128)
    scales = torch.tensor([2.0**k for k in exponents])
    codes = to_e8m0(scales)
    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), scales.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    assert torch.equal(from_e8m0(codes), scales)


@pytest.mark.parametrize("scale", [3.0, 0.0, -1.0, float("nan"), float("inf"), 1.0 + 2.0**-23])
def test_e8m0_refuses_what_one_byte_cannot_hold(scale):
    with pytest.raises(ConfigError, match="not powers of two"):
        to_e8m0(torch.tensor([1.0, scale]))
