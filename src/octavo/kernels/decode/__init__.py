"""Values of rotated codes: codes * scale, rotated back. What ranks do with INT8 codes of weights that they gather."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.runtime.dispatch import run_kernel
from octavo.numerics import Quantized, block_for

LONGEST = 32768
"""Longest row, in elements, that one program holds."""


def decode_rows(quantized: Quantized, rotation: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the values (R, C) that codes with a scale per row stand for, in `dtype`, rounded once.

    Args:
        quantized: contiguous codes (R, C), scales (R, 1).
        rotation: as the codes were made with, see `numerics.quantize`.
        out: memory for the result, contiguous.
    """
    codes, scale = quantized.codes, quantized.scale
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    refused = f"a row has more than {LONGEST} elements" if codes.shape[1] > LONGEST else None
    arguments = codes, scale, block_for(codes.shape[1], rotation), result
    run_kernel("decode.decode_rows", codes, arguments, "decode_rows", refused)
    return result
