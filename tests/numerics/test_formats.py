"""Every fact of a format follows from its five fields: checked against ml_dtypes and PyTorch, code by code."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    E5M2_FNUZ,
    E8M0,
    FORMATS,
    NARROW,
    dequantize,
    format_named,
    format_of,
    quantize,
    to_codes,
)

TWINS = [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2), (E8M0, ml_dtypes.float8_e8m0fnu)]
NARROW_TWINS = [(E2M3, ml_dtypes.float6_e2m3fn), (E3M2, ml_dtypes.float6_e3m2fn), (E2M1, ml_dtypes.float4_e2m1fn)]
FNUZ_TWINS = [(E4M3_FNUZ, ml_dtypes.float8_e4m3fnuz), (E5M2_FNUZ, ml_dtypes.float8_e5m2fnuz)]
ALL_CODES = np.arange(256, dtype=np.uint8)
twins = pytest.mark.parametrize(("fmt", "twin"), [*TWINS, *FNUZ_TWINS], ids=lambda value: getattr(value, "name", ""))
narrow_twins = pytest.mark.parametrize(("fmt", "twin"), NARROW_TWINS, ids=lambda value: getattr(value, "name", ""))


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


@narrow_twins
def test_narrow_formats_are_those_of_ml_dtypes(fmt, twin):
    facts, bits = ml_dtypes.finfo(twin), 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert (fmt.max, fmt.smallest_subnormal, fmt.epsilon) == tuple(
        map(float, (facts.max, facts.smallest_subnormal, facts.eps))
    )
    codes = ALL_CODES[: 2**bits]
    expected = codes.view(twin).astype(np.float64)
    assert facts.bits == bits and np.isfinite(expected).all()
    np.testing.assert_array_equal(fmt.decode(torch.from_numpy(codes)).numpy(), expected)
    held = torch.from_numpy(expected).float()
    assert torch.equal(held.to(fmt.dtype).float(), held), "E4M3 has every value"


@narrow_twins
def test_values_round_to_narrow_formats_as_in_ml_dtypes(fmt, twin):
    dense = torch.linspace(-1.25, 1.25, 100_001) * fmt.max
    values = fmt.decode(torch.from_numpy(ALL_CODES[: 2 ** (1 + fmt.exponent_bits + fmt.mantissa_bits)])).float()
    between = (values.sort().values[1:] + values.sort().values[:-1]) / 2  # ties
    x = torch.cat([dense, values, between, torch.tensor([0.0, -0.0, 1e-30])])
    expected = x.clamp(-fmt.max, fmt.max).numpy().astype(twin).astype(np.float32)
    np.testing.assert_array_equal(to_codes(x, fmt).float().numpy(), expected)
    assert to_codes(torch.tensor([torch.nan, torch.inf]), fmt).isnan().all()


@pytest.mark.parametrize(("fmt", "twin"), FNUZ_TWINS, ids=lambda value: getattr(value, "name", ""))
def test_values_round_to_fnuz_formats_as_in_ml_dtypes(fmt, twin):
    values = fmt.decode(torch.from_numpy(ALL_CODES)).float()
    ordered = values[values.isfinite()].sort().values
    between = (ordered[1:] + ordered[:-1]) / 2  # ties
    dense = torch.linspace(-1.25, 1.25, 100_001) * fmt.max
    x = torch.cat([dense, ordered, between, torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    expected = x.clamp(-fmt.max, fmt.max).numpy().astype(twin).view(np.uint8)
    np.testing.assert_array_equal(to_codes(x, fmt).view(torch.uint8).numpy(), expected)
    assert (to_codes(torch.tensor([torch.nan, torch.inf, -torch.inf]), fmt).view(torch.uint8) == 0x80).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("fmt", "twin"), FNUZ_TWINS, ids=lambda value: getattr(value, "name", ""))
def test_a_matrix_in_fnuz_has_scales_for_its_range(fmt, twin, rounding):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    found = quantize(x, fmt, "row", scaling="float32", rounding=rounding)
    assert format_of(found.codes) is fmt
    torch.testing.assert_close(found.scale.flatten(), x.abs().amax(1) / fmt.max)
    as_theirs = found.codes.view(torch.uint8).numpy().view(twin).astype(np.float32)
    np.testing.assert_array_equal(dequantize(found).numpy(), as_theirs * found.scale.numpy())
    assert (dequantize(found) - x).abs().max() <= (1 + (rounding == "stochastic")) * fmt.epsilon / 2 * x.abs().max()


def test_no_recipe_has_fnuz():
    with pytest.raises(ConfigError, match="unknown format 'e4m3fnuz'"):
        format_named("e4m3fnuz")


@twins
def test_facts_are_those_of_torch(fmt, twin):
    facts = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal) == (facts.max, facts.tiny)
    assert fmt.epsilon == facts.eps * (1 + (fmt is E5M2_FNUZ)), "PyTorch states half of it there; ml_dtypes does not"


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
        found = format_of(torch.empty(2, dtype=torch.uint8).view(fmt.dtype))
        assert found is (E4M3 if name in NARROW else fmt)
    assert len(FORMATS) == len(TWINS) + len(NARROW_TWINS) + 1  # a new format needs its twin above; INT8 is numpy's


def test_unknown_format_says_what_was_meant():
    with pytest.raises(
        ConfigError, match=r"unknown format 'e4m4'\. Did you mean 'e4m3'\? Formats: e4m3, e5m2, .*e2m1\."
    ):
        format_named("e4m4")
