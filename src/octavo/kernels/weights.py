"""The stack contract: the rows of several weights quantised as one matrix, on a GPU in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo.kernels.dispatch import launches_on, runs_triton
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.numerics import Quantized


class Stack(NamedTuple):
    """Weights (N_i, K) one under the other."""

    quantized: Quantized
    """Codes (N, K), one scale per row."""
    rows: Any
    """Where each row of the weights lies, as the kernel reads it: good for as long as they stay there."""


def has_one_launch(weights: Sequence[Tensor], target: QuantSpec) -> bool:
    """Return whether one launch quantises these matrices (N_i, K)."""
    if not runs_triton(weights[0]) or (target.granularity, target.rounding) != ("row", "nearest"):
        return False
    from octavo.kernels.triton.weights import unsupported_reason

    return unsupported_reason(weights) is None


def quantize_stack(
    weights: Sequence[Tensor], target: QuantSpec, into: Quantized | None = None, rows: Any = None
) -> Stack:
    """Quantise matrices that have one launch.

    Args:
        into: memory for it, used where it fits.
        rows: of the stack that was made of weights at the same places.
    """
    from octavo.kernels.triton.weights import find_rows, quantize_rows

    count, cols, device = sum(weight.shape[0] for weight in weights), weights[0].shape[1], weights[0].device
    if into is None or into.codes.shape != (count, cols) or into.codes.device != device:
        into = empty(target, count, cols, device)
    rows = rows or find_rows(weights)
    with launches_on(device):
        quantize_rows(rows, weights[0].dtype, into, target.rule)
    return Stack(into, rows)
