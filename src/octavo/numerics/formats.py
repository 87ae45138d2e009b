"""Number formats of FP8 training, and their properties.

E4M3 and E5M2 are the OCP 8-bit formats (OFP8 1.0, table 1): E4M3 gives up infinities for range and has one NaN per
sign; E5M2 is IEEE-like. E8M0 (OCP MX 1.0, section 5.4.1) is a bare exponent and holds power-of-two scales. E2M3, E3M2
and E2M1 are the MX formats of six and four bits (section 5.3). E4M3 has all of their values, so their codes are stored
and multiplied as E4M3 codes, one byte each.

The FNUZ formats (finite, NaN, unsigned zero) are those of AMD's CDNA 3: a bias greater by one, no negative zero, whose
code is the only NaN, and values up to the last code. They are specified here, for what reads or compares such codes; no
recipe has them and no kernel multiplies them.

INT8 is a fixed-point format: evenly spaced values from -127 to 127. -128 is left out, since a range that is not
symmetric biases gradients (arXiv 2510.25602, section 4). It has no NaN: a tile with a value that is not finite has the
scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of 8 bits or fewer, fixed-point without exponent bits. All properties follow from the fields."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_sign: bool
    has_infinity: bool
    dtype: torch.dtype
    """Dtype of a tensor of codes."""
    has_nan: bool = True
    zero_is_unsigned: bool = False
    """Whether the code of a negative zero is the NaN, as in the FNUZ formats."""

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers, evenly spaced and without NaN."""
        return self.exponent_bits == 0

    @property
    def max(self) -> float:
        """The largest finite value."""
        if self.is_integer:
            return float(2**self.mantissa_bits - 1)
        if self.mantissa_bits == 0:  # E8M0: code 255 is NaN, 254 the largest value
            return float(2.0 ** (2**self.exponent_bits - 2 - self.bias))
        if self.has_infinity:  # IEEE-like: the top exponent is for infinities and NaN
            return float((2 - self.epsilon) * 2.0 ** (2**self.exponent_bits - 2 - self.bias))
        # The top exponent holds values; in E4M3 its last mantissa is NaN
        last = (2 if self.has_nan and not self.zero_is_unsigned else 1) * self.epsilon
        return float((2 - last) * 2.0 ** (2**self.exponent_bits - 1 - self.bias))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value that still has the full mantissa; above `max` in a fixed-point format."""
        return 2.0**-self.bias if self.mantissa_bits == 0 else 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; anything below half of it rounds to zero."""
        return self.smallest_normal if self.mantissa_bits == 0 else self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next value."""
        return 2.0**-self.mantissa_bits

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float64 value of each code, from the definition of the format rather than from a cast.

        Args:
            codes: uint8, any shape; narrower formats use the low bits.
        """
        if self.is_integer:
            return codes.view(torch.int8).double()
        bits = codes.to(torch.int64)
        mantissa = bits & (2**self.mantissa_bits - 1)
        exponent = (bits >> self.mantissa_bits) & (2**self.exponent_bits - 1)
        fraction = mantissa.double() * 2.0**-self.mantissa_bits
        power = torch.pow(2.0, (exponent - self.bias).double())
        value = torch.where(exponent > 0, power * (1 + fraction), self.smallest_normal * fraction)
        if not self.has_sign:  # E8M0 has neither sign, zero nor subnormals
            return torch.where(bits == 255, torch.nan, power)
        top = exponent == 2**self.exponent_bits - 1
        if self.zero_is_unsigned:
            value = torch.where(bits == 2 ** (self.exponent_bits + self.mantissa_bits), torch.nan, value)
        elif self.has_infinity:
            value = torch.where(top, torch.where(mantissa == 0, torch.inf, torch.nan), value)
        elif self.has_nan:
            value = torch.where(top & (mantissa == 2**self.mantissa_bits - 1), torch.nan, value)
        return torch.where(bits >= 2 ** (self.exponent_bits + self.mantissa_bits), -value, value)


E4M3 = Format(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    has_sign=True,
    has_infinity=False,
    dtype=torch.float8_e4m3fn,
)
E5M2 = Format(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    has_sign=True,
    has_infinity=True,
    dtype=torch.float8_e5m2,
)
E8M0 = Format(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    has_sign=False,
    has_infinity=False,
    dtype=torch.float8_e8m0fnu,
)


INT8 = Format(
    name="int8",
    exponent_bits=0,
    mantissa_bits=7,
    bias=-6,  # the smallest normal is 2^7: all values are subnormal, 1 apart
    has_sign=True,
    has_infinity=False,
    has_nan=False,
    dtype=torch.int8,
)


def _narrow(exponent_bits: int, mantissa_bits: int, bias: int) -> Format:
    return Format(
        name=f"e{exponent_bits}m{mantissa_bits}",
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        has_sign=True,
        has_infinity=False,
        dtype=torch.float8_e4m3fn,
        has_nan=False,
    )


E2M3, E3M2, E2M1 = _narrow(2, 3, 1), _narrow(3, 2, 3), _narrow(2, 1, 1)
NARROW = {f.name: f for f in (E2M3, E3M2, E2M1)}
"""MX formats, whose codes are stored as E4M3 codes."""
E4M3_FNUZ = replace(E4M3, name="e4m3fnuz", bias=8, dtype=torch.float8_e4m3fnuz, zero_is_unsigned=True)
E5M2_FNUZ = replace(
    E5M2, name="e5m2fnuz", bias=16, has_infinity=False, dtype=torch.float8_e5m2fnuz, zero_is_unsigned=True
)
FORMATS = {f.name: f for f in (E4M3, E5M2, E8M0, INT8)} | NARROW
"""Formats of recipes, by name."""
_BY_DTYPE = {f.dtype: f for f in (*FORMATS.values(), E4M3_FNUZ, E5M2_FNUZ) if f.name not in NARROW}


def format_named(name: str) -> Format:
    """Return the format of that name.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"unknown format '{name}'.{did_you_mean(name, FORMATS)} Formats: {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_of(codes: Tensor) -> Format:
    """Return the format of a tensor of codes, from its dtype; E4M3 for narrower formats."""
    return _BY_DTYPE[codes.dtype]
