"""Kernels: one contract an operation, a `reference/` twin, `vendor/` for PyTorch's own, a record of what ran."""

from octavo.kernels.explain import explain
from octavo.kernels.gemm import ACCUMULATORS, gemm, gemm_by
from octavo.kernels.ledger import Ledger, record
from octavo.kernels.quantize import (
    contiguous,
    quantize,
    quantize_pair,
    quantize_stack,
    transpose_quantized,
    without_scale,
)
from octavo.kernels.quantize_at import Cell, quantize_at
from octavo.kernels.target import Target
from octavo.kernels.transpose import transpose, transpose_folded

__all__ = [
    "ACCUMULATORS",
    "Cell",
    "Ledger",
    "Target",
    "contiguous",
    "explain",
    "gemm",
    "gemm_by",
    "quantize",
    "quantize_at",
    "quantize_pair",
    "quantize_stack",
    "record",
    "transpose",
    "transpose_folded",
    "transpose_quantized",
    "without_scale",
]
