"""The contract of a GEMM and the backward of an activation as one: dgrad of `down`, and what becomes of its result.

    dh = g . w^T        g (M, K), w (F, K)
    D, D^T, h^T         `kernels.activation.activation_backward` of dh

dh is rounded as by the GEMM alone. Its epilogue finds the maxima of D, for which the two operations by themselves read
dh, gate and up once more. On a GPU the GEMM is Octavo's own in place of the vendor's: both add up chains of 128
products in FP32 if accumulation is slow, and differ in no bit that was seen; if it is fast, the order of sums differs.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from octavo.kernels.activation import ActivationGradients, Factors, Targets, empty_gradients
from octavo.kernels.gemm import accumulator_in_use
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import architecture, run_kernel, triton_unsupported_reason
from octavo.kernels.runtime.operation import operation
from octavo.numerics import PER_ROW, PER_TENSOR, Quantized

LEAST = 2**25
"""Least number of elements of dh. Below, the host's time counts: the GEMM's launch cannot be replayed."""
_ALIGNED = 16
"""Alignment of rows in bytes, for TMA."""


@cache
def is_off() -> bool:
    """Return whether `OCTAVO_EPILOGUES=0` switches epilogues off, to measure what they gain. Read once."""
    return os.environ.get("OCTAVO_EPILOGUES") == "0"


def unfused_reason(
    g: Quantized, gate: Tensor | Quantized, up: Tensor | Quantized | None, targets: Targets, factors: Factors
) -> str | None:
    """Return why the GEMM and the backward of the activation are to run one after the other, or None.

    Arguments as for `gemm_activation_backward`; w is like g.
    """
    if not isinstance(gate, Tensor) or not isinstance(up, Tensor):
        return "gate and up are codes, or there is no gate"
    if g.codes.dtype != torch.float8_e4m3fn or g.granularity not in (PER_ROW, PER_TENSOR):
        return "the gradient is not E4M3 by row"
    if any(target is not None and target.granularity != "row" for target in targets[:2]):
        return "D has not one scale per row and one per column"
    if targets.hidden is not None and factors.hidden is None:
        return "h is searched too"
    if g.codes.shape[1] % _ALIGNED or gate.shape[1] * gate.element_size() % _ALIGNED:
        return f"rows are not multiples of {_ALIGNED} bytes"
    if gate.numel() < LEAST:
        return f"dh has fewer than {LEAST:,} elements"
    return _unsupported_reason(gate.device)


def _unsupported_reason(device: torch.device) -> str | None:
    if is_off():
        return "OCTAVO_EPILOGUES=0 switches epilogues off"
    if any(override is not None for override in accumulator_in_use()):
        return "`gemm_by` names an accumulator"
    if reason := triton_unsupported_reason(device):
        return reason
    arch = architecture(device)
    return None if arch.grouped else f"Octavo's FP8 GEMM does not run on this GPU ({arch.name})"


def gemm_activation_backward(
    g: Quantized,
    w: Quantized,
    accumulate: str,
    kind: str,
    gate: Tensor,
    up: Tensor,
    targets: Targets,
    factors: Factors,
) -> ActivationGradients:
    """Return D, D^T and h^T of dh = g . w^T, quantised; a result without a target is skipped.

    Args:
        g: E4M3 codes (M, K), contiguous; one scale per row, or one.
        w: (F, K), likewise.
        accumulate: `slow` or `fast`.
        kind, targets, factors: as for `activation_backward`. There is no `unfused_reason` for them.
        gate: (M, F), whose dtype is that of dh.
        up: as gate.
    """
    return _gemm_activation_backward(g, w, accumulate, kind, gate, up, targets, factors)


def _fake(
    _g: object, _w: object, _accumulate: str, _kind: str, gate: Tensor, _up: Tensor, targets: Targets, _factors: Factors
) -> ActivationGradients:
    return empty_gradients(gate, True, targets)


@operation(fake=_fake, results=lambda *arguments: arguments[6], tags=[torch.Tag.needs_fixed_stride_order])
def _gemm_activation_backward(
    g: Quantized,
    w: Quantized,
    accumulate: str,
    kind: str,
    gate: Tensor,
    up: Tensor,
    targets: Targets,
    factors: Factors,
) -> ActivationGradients:
    refused = _unsupported_reason(gate.device) if gate.is_cuda else None
    ledger.count("gemm_activation" if gate.is_cuda and not refused else "reference")
    arguments, name = (g, w, accumulate, kind, gate, up, targets, factors), "gemm_activation.gemm_activation_backward"
    return ActivationGradients(*run_kernel(name, gate, arguments, f"gemm_activation_backward {kind}", refused))
