"""Codes are what the formats' own casts give, and stochastic rounding is right on the average."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.storage import BF16, E4M3, E5M2, FLOATS, FP16, UE4M4, Storage
from octavo.kernels.storage import reference as codec

EIGHT = [E4M3, E5M2, UE4M4]


@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16], ids=lambda fmt: fmt.name)
def test_codes_are_those_of_a_cast(fmt):
    torch.manual_seed(0)
    x = torch.randn(1 << 16) * torch.exp2(torch.randint(-20, 8, (1 << 16,)).float())
    x = torch.cat([x.clamp(-fmt.max, fmt.max), torch.tensor([0.0, -0.0, fmt.max, -fmt.max])])
    cast = x.to(fmt.dtype)
    # Values that FP32 itself rounds, far below the format's last step, may lie on the other side of a tie.
    view = torch.uint8 if fmt.bits == 8 else torch.int16
    found = codec.encode(x, fmt)
    expected = cast.view(view).int() & ((1 << fmt.bits) - 1)
    assert torch.equal(found, expected)
    assert torch.equal(codec.decode(found, fmt), cast.float())


@pytest.mark.parametrize("fmt", EIGHT, ids=lambda fmt: fmt.name)
def test_every_code_is_its_own_value(fmt):
    values = torch.arange(256)
    decoded = codec.decode(values.int(), fmt)
    kept = decoded.abs() <= fmt.max
    assert torch.equal(codec.encode(decoded[kept], fmt), values[kept].int())


@pytest.mark.parametrize("fmt", [E4M3, E5M2, BF16, FP16], ids=lambda fmt: fmt.name)
def test_what_is_no_number_stays_none(fmt):
    code = codec.encode(torch.tensor([torch.nan, -torch.nan, 1.0]), fmt)
    assert codec.decode(code, fmt).isnan().tolist() == [True, True, False]


def test_ue4m4_is_what_it_says():
    code = torch.arange(256)
    exponent, mantissa = code >> 4, (code & 15).double()
    expected = torch.where(exponent == 0, mantissa * 2.0**-10, torch.exp2(exponent.double() - 7) * (1 + mantissa / 16))
    assert torch.equal(codec.decode(code.int(), UE4M4).double(), expected)
    assert expected.max() == UE4M4.max


@pytest.mark.parametrize("fmt", [*EIGHT, BF16, FP16], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_has_no_bias(fmt):
    x = torch.tensor([1.0, 1.013, 1.3, 0.0137, 3e-3, 2.71]).repeat_interleave(1 << 16)
    every = torch.arange(1 << 16).repeat(6).int()  # all random bits there are
    mean = codec.decode(codec.encode(x, fmt, every), fmt).double().reshape(6, -1).mean(dim=1)
    step = x.reshape(6, -1)[:, 0].double() * 2.0**-fmt.mantissa_bits
    step = step.clamp(min=2.0 ** (fmt.smallest_exponent - fmt.mantissa_bits))
    assert ((mean - x.reshape(6, -1)[:, 0].double()).abs() <= step * 2.0**-12).all()


def test_the_square_of_a_rounded_root_has_no_bias():
    """Below 2^-6 codes are subnormal; the smallest is 2^-10."""
    x = torch.tensor([0.5, 1.0, 1.0005, 1.031, 1.06, 1.97, 1.9999, 255.3, 490.0, 0.0101, 0.0021, 0.00098, 0.0])
    every = torch.arange(1 << 16).repeat(len(x)).int()
    codes = codec.encode(x.repeat_interleave(1 << 16), UE4M4, every, root=True).reshape(len(x), -1)
    values = codec.decode(codes, UE4M4).double()
    gap = values.amax(dim=1).square() - values.amin(dim=1).square()
    assert ((values.square().mean(dim=1) - x.double().square()).abs() <= gap * 2.0**-17).all()
    assert all(len(row.unique()) == (1 if value in (0.5, 1.0, 0.0) else 2) for row, value in zip(codes, x, strict=True))
    plain = codec.decode(codec.encode(x.repeat_interleave(1 << 16), UE4M4, every), UE4M4).double().reshape(len(x), -1)
    assert float(plain.square().mean(dim=1)[3] / x[3].double().square()) > 1.0005  # as it would be


def test_stochastic_rounding_does_not_lean():
    """Not by a unit of its random bits either: an average over a thousand steps would show it."""
    torch.manual_seed(0)
    x = 1 + torch.rand(64)
    every = torch.arange(1 << 16).int()
    mean = codec.decode(codec.encode(x[:, None], E4M3, every), E4M3).double().mean(dim=1)
    assert abs(float((mean - x.double()).mean())) < 2.0**-3 * 2.0**-19


@given(st.floats(2.0**-126, 400, width=32))
def test_what_is_positive_is_never_stored_as_zero(value):
    x = torch.tensor([value])
    assert int(codec.encode(x, UE4M4, never_zero=True)) >= 1
    assert int(codec.encode(x, UE4M4, torch.zeros(1, dtype=torch.int32), never_zero=True)) >= 1
    assert int(codec.encode(torch.zeros(1), UE4M4, never_zero=True)) == 0


@pytest.mark.parametrize("fmt", [BF16, E4M3], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_split_value_is_put_together_again(fmt, bits):
    torch.manual_seed(0)
    dropped = max(fmt.dropped - bits, 0)
    magnitude = (torch.rand(1 << 14) * 400 * fmt.shift).view(torch.int32)
    high, low = codec.split(magnitude, bits, dropped, None)
    assert low.min() >= -(1 << (bits - 1)) and low.max() < 1 << (bits - 1)
    again = codec.join(high, low, bits, dropped)
    assert ((again - magnitude).abs() <= (1 << dropped) // 2).all()
    if dropped == 0:
        assert torch.equal(again, magnitude)
    nearest = codec.decode(high, fmt)
    value = magnitude.view(torch.float32) / fmt.shift
    assert ((nearest - value).abs() <= _step(value, fmt) / 2).all()


def _step(value, fmt):
    exponent = torch.frexp(value).exponent - 1
    return torch.exp2(exponent.clamp(min=fmt.smallest_exponent).float() - fmt.mantissa_bits) * (1 + 2.0**-7)


@pytest.mark.parametrize("name", FLOATS)
def test_the_largest_value_of_a_group_fits(name):
    fmt = FLOATS[name]
    amax = torch.exp2(torch.linspace(-60, 60, 999)) * 1.37
    code = codec.scale_code(amax, fmt)
    assert (amax * codec.inverse_of(code) <= fmt.max).all()
    assert (2 * amax * codec.inverse_of(code) > fmt.max)[code > 1].all() or name in ("fp32", "bf16")
    assert torch.equal(codec.scale_of(code) * codec.inverse_of(code), torch.ones(999))


def test_groups_do_not_straddle_rows():
    x = torch.arange(6 * 130).reshape(6, 130).float()
    groups = codec.to_groups(x)
    assert groups.shape == (12, 128) and torch.equal(groups[1, :3], torch.tensor([128.0, 129, 0]))
    assert torch.equal(codec.from_groups(groups, 6, 130), x)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'e4m3'"):
        Storage("e4m33")
