"""How an optimizer keeps a value: a format, one scale for how many values, and whether it is the root that is kept.

Every format is FP32 with mantissa bits dropped. Multiplied by a power of two that moves the format's smallest normal
value onto FP32's, a value has the code in its top bits, subnormals included:

    code  = bits(value * shift) >> dropped          rounded up or down before the shift
    value = float(code << dropped) / shift

so one line of arithmetic reads and writes all of them, and a stochastic rounding is one addition of random bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from octavo.errors import ConfigError, did_you_mean

GROUP = 128
"""Values of a row that share a scale; a group never straddles two rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float:
    """A floating-point format as a range of FP32's bits."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    smallest_exponent: int
    """Of its normal values."""
    max: float
    signed: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.dtype.itemsize

    @property
    def dropped(self) -> int:
        """Mantissa bits that FP32 has beyond it."""
        return 23 - self.mantissa_bits

    @property
    def shift(self) -> float:
        """What moves its smallest normal value onto FP32's, 2^-126."""
        return float(2.0 ** (-126 - self.smallest_exponent))


FP32 = Float(name="fp32", dtype=torch.float32, mantissa_bits=23, smallest_exponent=-126, max=torch.finfo().max)
BF16 = Float(name="bf16", dtype=torch.bfloat16, mantissa_bits=7, smallest_exponent=-126, max=3.3895313892515355e38)
FP16 = Float(name="fp16", dtype=torch.float16, mantissa_bits=10, smallest_exponent=-14, max=65504.0)
E4M3 = Float(name="e4m3", dtype=torch.float8_e4m3fn, mantissa_bits=3, smallest_exponent=-6, max=448.0)
E5M2 = Float(name="e5m2", dtype=torch.float8_e5m2, mantissa_bits=2, smallest_exponent=-14, max=57344.0)
UE4M4 = Float(name="ue4m4", dtype=torch.uint8, mantissa_bits=4, smallest_exponent=-6, max=496.0, signed=False)
"""For values that are never negative: the sign bit is a mantissa bit. No code stands for NaN or an infinity."""

FLOATS = {f.name: f for f in (FP32, BF16, FP16, E4M3, E5M2, UE4M4)}

GRADIENT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Dtypes of stored gradients, and their formats."""

Scaling = Literal["none", "tensor", "group"]
"""One scale for how many values. Scales are powers of two, a byte each (E8M0): never FP16, whose range is too small."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How one value per parameter is kept."""

    format: str
    """A name in `FLOATS`."""
    scaling: Scaling = "none"
    root: bool = False
    """It is the square root that is kept, for values that are never negative; half the exponents do."""

    def __post_init__(self) -> None:
        if self.format not in FLOATS:
            near = did_you_mean(self.format, FLOATS)
            raise ConfigError(f"storage: unknown format '{self.format}'.{near} Formats: {', '.join(FLOATS)}.")

    @property
    def float(self) -> Float:
        """The facts of its format."""
        return FLOATS[self.format]

    @property
    def is_exact(self) -> bool:
        """Whether it keeps an FP32 value as it is."""
        return self == Storage("fp32")

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int] | None:
        """Return the shape of the scales of a matrix (rows, cols), uint8; None where there are none."""
        return {"none": None, "tensor": (1, 1), "group": (rows, groups_of(cols))}[self.scaling]


def groups_of(cols: int) -> int:
    """Return how many groups a row of so many values has; the last may be shorter."""
    return -(-cols // GROUP)
