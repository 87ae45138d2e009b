"""The scattered-rows contract: rows at arbitrary addresses, quantised as one matrix in one launch on a GPU.

`octavo.kernels.quantize_stack` needs no address table, but takes few matrices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.runtime.dispatch import implementation, launches_on, runs_triton
from octavo.numerics import Quantized


class ScatteredRows(NamedTuple):
    """The rows of several matrices (N_i, K), quantised as one (N, K)."""

    quantized: Quantized
    """Codes (N, K), one scale per row."""
    table: Any
    """Address table of the rows for the kernel; valid until the matrices are reallocated."""


def is_supported(matrices: Sequence[Tensor], target: QuantSpec) -> bool:
    """Return whether one launch can quantise these matrices (N_i, K)."""
    if not runs_triton(matrices[0]) or (target.granularity, target.rounding) != ("row", "nearest"):
        return False
    if target.needs_whole_rows:
        return False
    return implementation("triton_weights", "quantize").unsupported_reason(matrices) is None


def quantize_scattered_rows(
    matrices: Sequence[Tensor], target: QuantSpec, into: Quantized | None = None, table: Any = None
) -> ScatteredRows:
    """Quantise matrices for which `is_supported` holds.

    Args:
        into: buffer for the result, used if shape and device match.
        table: address table of an earlier result, for matrices at the same addresses.
    """
    fast = implementation("triton_weights", "quantize")
    count, cols, device = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1], matrices[0].device
    if into is None or into.codes.shape != (count, cols) or into.codes.device != device:
        into = empty(target, count, cols, device)
    table = table or fast.find_rows(matrices)
    with launches_on(device):
        fast.quantize_rows(table, matrices[0].dtype, into, target.rule)
    return ScatteredRows(into, table)
