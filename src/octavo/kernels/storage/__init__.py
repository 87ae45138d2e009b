"""Storage of optimizer state: format, scaling granularity, and optionally the square root.

Every format is FP32 with fewer mantissa bits. Once scaled by the power of two that maps the format's smallest normal
value to FP32's, the top bits of an FP32 value are the code, including subnormals:

    code  = bits(value * shift) >> dropped          with rounding before the right shift
    value = float(code << dropped) / shift

so one expression encodes or decodes all formats, and stochastic rounding is one addition of random bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from octavo.errors import ConfigError, did_you_mean

GROUP = 128
"""Values per scale along a row; groups do not straddle rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Float:
    """A floating-point format as a slice of the bits of FP32."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    smallest_exponent: int
    """Exponent of the smallest normal value."""
    max: float
    signed: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.dtype.itemsize

    @property
    def dropped(self) -> int:
        """Mantissa bits dropped from FP32."""
        return 23 - self.mantissa_bits

    @property
    def shift(self) -> float:
        """Power of two that maps the smallest normal value to FP32's, 2^-126."""
        return float(2.0 ** (-126 - self.smallest_exponent))


FP32 = Float(name="fp32", dtype=torch.float32, mantissa_bits=23, smallest_exponent=-126, max=torch.finfo().max)
BF16 = Float(name="bf16", dtype=torch.bfloat16, mantissa_bits=7, smallest_exponent=-126, max=3.3895313892515355e38)
FP16 = Float(name="fp16", dtype=torch.float16, mantissa_bits=10, smallest_exponent=-14, max=65504.0)
E4M3 = Float(name="e4m3", dtype=torch.float8_e4m3fn, mantissa_bits=3, smallest_exponent=-6, max=448.0)
E5M2 = Float(name="e5m2", dtype=torch.float8_e5m2, mantissa_bits=2, smallest_exponent=-14, max=57344.0)
UE4M4 = Float(name="ue4m4", dtype=torch.uint8, mantissa_bits=4, smallest_exponent=-6, max=496.0, signed=False)
"""For non-negative values: the sign bit is a mantissa bit. No codes for NaN and infinity."""

FLOATS = {f.name: f for f in (FP32, BF16, FP16, E4M3, E5M2, UE4M4)}

GRADIENT_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Formats of stored gradients by dtype."""

Scaling = Literal["none", "tensor", "group"]
"""Scaling granularity. Scales are powers of two in one byte (E8M0); the range of FP16 would be too small."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of one value per parameter."""

    format: str
    """Key of `FLOATS`."""
    scaling: Scaling = "none"
    root: bool = False
    """Store the square root, for non-negative values: it needs half the exponent range."""

    def __post_init__(self) -> None:
        if self.format not in FLOATS:
            near = did_you_mean(self.format, FLOATS)
            raise ConfigError(f"storage: unknown format '{self.format}'.{near} Formats: {', '.join(FLOATS)}.")

    @property
    def float(self) -> Float:
        """Properties of the format."""
        return FLOATS[self.format]

    @property
    def is_exact(self) -> bool:
        """Whether FP32 values are stored unchanged."""
        return self == Storage("fp32")

    @property
    def holds_values(self) -> bool:
        """Whether the stored tensor, read in its dtype, is the values: no codes with scales, and no roots."""
        return self.scaling == "none" and not self.root and self.float.signed

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int] | None:
        """Return the shape of the uint8 scales of a matrix (rows, cols); None without scales."""
        return {"none": None, "tensor": (1, 1), "group": (rows, groups_of(cols))}[self.scaling]


def groups_of(cols: int) -> int:
    """Return the number of groups per row of `cols` values; the last may be shorter."""
    return -(-cols // GROUP)
