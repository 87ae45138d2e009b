"""Every fact of a format follows from its five fields: checked against ml_dtypes and PyTorch, code by code."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics import E4M3, E5M2, E8M0, FORMATS, format_named, format_of

TWINS = [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2), (E8M0, ml_dtypes.float8_e8m0fnu)]
ALL_CODES = np.arange(256, dtype=np.uint8)
twins = pytest.mark.parametrize(("fmt", "twin"), TWINS, ids=lambda value: getattr(value, "name", ""))


@twins
def test_facts_are_those_of_ml_dtypes(fmt, twin):
    facts = ml_dtypes.finfo(twin)
    assert fmt.max == float(facts.max)
    assert fmt.smallest_normal == float(facts.smallest_normal)
    assert fmt.smallest_subnormal == float(facts.smallest_subnormal)
    assert fmt.epsilon == float(facts.eps)
    assert fmt.mantissa_bits == facts.nmant
    assert fmt.exponent_bits == facts.nexp
    assert fmt.has_sign + fmt.exponent_bits + fmt.mantissa_bits == facts.bits == 8


@twins
def test_facts_are_those_of_torch(fmt, twin):
    facts = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal, fmt.epsilon) == (facts.max, facts.tiny, facts.eps)


@twins
def test_bias_sign_and_infinity_can_be_read_off_the_codes(fmt, twin):
    values = ALL_CODES.view(twin).astype(np.float64)
    one = int(np.flatnonzero(values == 1.0)[0])  # the value 1 has mantissa 0 and the bias as its exponent field
    assert one >> fmt.mantissa_bits == fmt.bias
    assert bool((values < 0).any()) == fmt.has_sign
    assert bool(np.isinf(values).any()) == fmt.has_infinity


@twins
def test_all_256_codes_decode_as_in_ml_dtypes(fmt, twin):
    decoded = fmt.decode(torch.from_numpy(ALL_CODES))
    expected = ALL_CODES.view(twin).astype(np.float64)
    assert decoded.dtype == torch.float64
    np.testing.assert_array_equal(decoded.numpy(), expected)  # NaN equals NaN here
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded.numpy())[finite], np.signbit(expected)[finite])  # -0.0


@twins
def test_all_256_codes_decode_as_in_torch(fmt, twin):
    codes = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(fmt.decode(codes), codes.view(fmt.dtype).double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("fmt", "largest"), [(E4M3, 448.0), (E5M2, 57344.0), (E8M0, 2.0**127)], ids=lambda v: str(v))
def test_largest_values_are_those_of_the_standard(fmt, largest):
    assert fmt.max == largest  # OFP8 1.0, table 2; OCP MX 1.0, section 5.4.1


@pytest.mark.parametrize(("fmt", "count"), [(E4M3, 2), (E5M2, 6), (E8M0, 1)])
def test_count_of_nan_codes(fmt, count):
    assert int(fmt.decode(torch.arange(256, dtype=torch.uint8)).isnan().sum()) == count


def test_formats_are_found_by_name_and_by_dtype():
    for name, fmt in FORMATS.items():
        assert format_named(name) is fmt
        assert format_of(torch.empty(2, dtype=torch.uint8).view(fmt.dtype)) is fmt
    assert len(FORMATS) == len(TWINS)  # a new format needs its twin above


def test_unknown_format_says_what_was_meant():
    with pytest.raises(ConfigError, match=r"unknown format 'e4m4'\. Did you mean 'e4m3'\? Formats: e4m3, e5m2, e8m0\."):
        format_named("e4m4")
