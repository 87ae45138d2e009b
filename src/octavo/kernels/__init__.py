"""Kernels: one folder per operation, its contract over `reference`, `triton` and PyTorch's own in `vendor`."""

from octavo.kernels.decode import decode_rows
from octavo.kernels.explain import explain
from octavo.kernels.gemm import ACCUMULATORS, gemm, gemm_by
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import (
    contiguous,
    quantize,
    quantize_matrix,
    quantize_normed,
    quantize_pair,
    quantize_rows_twice,
    quantize_stack,
    quantize_transposed,
    requantize_transposed,
    transpose_quantized,
    without_scale,
)
from octavo.kernels.quantize_with_scale import ScaleRef, quantize_with_scale
from octavo.kernels.runtime.ledger import Ledger, record
from octavo.kernels.transpose import transpose, transpose_folded

__all__ = [
    "ACCUMULATORS",
    "Ledger",
    "QuantSpec",
    "ScaleRef",
    "contiguous",
    "decode_rows",
    "explain",
    "gemm",
    "gemm_by",
    "quantize",
    "quantize_matrix",
    "quantize_normed",
    "quantize_pair",
    "quantize_rows_twice",
    "quantize_stack",
    "quantize_transposed",
    "quantize_with_scale",
    "record",
    "requantize_transposed",
    "transpose",
    "transpose_folded",
    "transpose_quantized",
    "without_scale",
]
