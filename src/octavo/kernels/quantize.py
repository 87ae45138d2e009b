"""The quantise contract: what one pass over a matrix produces, in the layout that the GEMM reads.

Today there is one implementation, the specification itself: eager on a CPU, fused by `torch.compile` on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from octavo.numerics import Quantized, Rounding, Scaling, format_named, granularity_named
from octavo.numerics import quantize as reference_quantize


def quantize(
    x: Tensor,
    format: str,
    granularity: str,
    scaling: Scaling = "power_of_two",
    rounding: Rounding = "nearest",
    seed: int | Tensor = 0,
) -> Quantized:
    """Quantise an (R, C) matrix. The codes come out contiguous, also those of a transposed view.

    Raises:
        ConfigError: x is not a matrix, or a name is unknown.
    """
    fmt, tile = format_named(format), granularity_named(granularity)
    quantized = reference_quantize(x, fmt, tile, scaling, rounding, seed)
    return contiguous(quantized)


def contiguous(quantized: Quantized) -> Quantized:
    """Return the same matrix with contiguous codes and scales: of a transposed view, a byte transpose."""
    return Quantized(quantized.codes.contiguous(), quantized.scale.contiguous(), quantized.granularity)
