"""Reference: PyTorch operations in FP32."""

from __future__ import annotations

from torch import Tensor

from octavo.numerics import PER_ROW, Quantized, dequantize, rotate


def decode_rows(codes: Tensor, scale: Tensor, block: int, out: Tensor) -> None:
    """See `octavo.kernels.decode.decode_rows`; block: size of H."""
    out.copy_(rotate(dequantize(Quantized(codes, scale, PER_ROW)), block))
