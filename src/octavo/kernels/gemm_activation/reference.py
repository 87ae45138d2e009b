"""The definition: the reference GEMM, and then the reference backward of the activation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.activation.reference import activation_backward
from octavo.kernels.gemm.reference import gemm
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import Quantized


def gemm_activation_backward(
    g: Quantized,
    w: Quantized,
    accumulate: str,
    kind: str,
    gate: Tensor,
    up: Tensor,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """See `octavo.kernels.gemm_activation.gemm_activation_backward`."""
    with torch.autocast(gate.device.type, enabled=False):  # it would round the FP32 operands of the GEMM to BF16
        dh = gemm(g, w, gate.dtype)
    return activation_backward(kind, dh, gate, up, targets, factors)
