"""Kernel selection and its reasons, found by probing the kernels with the smallest operands.

Support for a particular shape or target is decided per call by the contract, and recorded in the ledger.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from octavo.kernels.gemm import KERNELS, choose
from octavo.kernels.runtime.dispatch import check_present, is_planning, triton_unsupported_reason
from octavo.numerics import Quantized, format_named, granularity_named, quantize

OPERATIONS = (
    "quantize", "quantize_with_scale", "weights", "transpose", "activation", "norm", "rotary", "cross_entropy",
    "patches",
    "grouped",
)  # fmt: skip
"""Operations with a Triton and a reference kernel."""
_PROBES = {
    "scaled_mm.tensor": ("tensor", "tensor"),
    "scaled_mm.row": ("row", "row"),
    "scaled_mm.mx": ("1x32", "1x32"),
    "emulated.1x32": ("1x32", "1x32"),
    "reference": ("128x128", "128x128"),
}
"""Operand granularities to probe a GEMM kernel with; 1x128 and 128x128 for all others."""


def explain(device: torch.device | str) -> list[dict[str, str | bool]]:
    """Return one row per kernel: `operation`, `kernel`, `available` on this device, and `reason` if not.

    The first available kernel of an operation runs.
    """
    rows: list[dict[str, str | bool]] = []
    for kernel in KERNELS:
        operands = _PROBES.get(kernel.name, ("1x128", "128x128"))
        a, b = (probe_operand(name, "e4m3", device) for name in operands)
        rows.append(_row("gemm", kernel.name, kernel.unsupported_reason(a, b)))
    refused = triton_unsupported_reason(torch.device(device))
    for operation in OPERATIONS:
        rows += [_row(operation, "triton", refused), _row(operation, "reference", None)]
    return rows


def _row(operation: str, kernel: str, reason: str | None) -> dict[str, str | bool]:
    return {"operation": operation, "kernel": kernel, "available": reason is None, "reason": reason or ""}


def gemm_kernel(device: torch.device | str, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, dict[str, str]]:
    """Return the GEMM kernel for two (format, granularity) operands, and why the preferred ones were refused."""
    kernel, refused = choose(probe_operand(a[1], a[0], device), probe_operand(b[1], b[0], device))
    return kernel.name, refused


def probe_operand(granularity: str, fmt: str, device: torch.device | str) -> Quantized:
    """Return the smallest operand of a granularity and format. A folded operand has a single scale in the GEMM.

    Raises:
        UnsupportedError: there is no CUDA device to probe.
    """
    tile = granularity_named("tensor" if granularity == "column" else granularity)
    if is_planning():
        with FakeTensorMode():
            codes = torch.empty(128, 128, dtype=format_named(fmt).dtype, device="cuda")
            return Quantized(codes, torch.empty(tile.scale_shape(128, 128), device="cuda", dtype=torch.float32), tile)
    check_present(torch.device(device))
    return quantize(torch.ones(128, 128, device=device, dtype=torch.float32), format_named(fmt), tile)
