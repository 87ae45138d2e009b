"""Which kernel would run, and why not another: answered by asking the kernels themselves with the smallest operands.

Whether a Triton kernel takes a particular shape or target, its contract decides in the call; a ledger has the reason.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from octavo.errors import UnsupportedError
from octavo.kernels.devices import GPUS
from octavo.kernels.dispatch import is_planning, triton_unsupported_reason
from octavo.kernels.gemm import KERNELS, choose
from octavo.numerics import Quantized, format_named, granularity_named, quantize

TWINS = (
    "quantize", "quantize_with_scale", "weights", "transpose", "activation", "norm", "rotary", "cross_entropy",
    "patches",
    "grouped",
)  # fmt: skip
"""Operations that have two kernels: Triton's and the reference."""
_PROBES = {
    "scaled_mm.tensor": ("tensor", "tensor"),
    "scaled_mm.row": ("row", "row"),
    "scaled_mm.mx": ("1x32", "1x32"),
    "emulated.1x32": ("1x32", "1x32"),
    "reference": ("128x128", "128x128"),
}
"""The granularities that a GEMM kernel is asked with. All others are for blocks."""


def explain(device: torch.device | str) -> list[dict[str, str | bool]]:
    """Return for every kernel whether this device can run it: `operation`, `kernel`, `available`, `reason`.

    Of an operation's kernels the first that is available runs.
    """
    rows: list[dict[str, str | bool]] = []
    for kernel in KERNELS:
        operands = _PROBES.get(kernel.name, ("1x128", "128x128"))
        a, b = (probe_operand(name, "e4m3", device) for name in operands)
        rows.append(_row("gemm", kernel.name, kernel.unsupported_reason(a, b)))
    refused = triton_unsupported_reason(torch.device(device))
    for operation in TWINS:
        rows += [_row(operation, "triton", refused), _row(operation, "reference", None)]
    return rows


def _row(operation: str, kernel: str, reason: str | None) -> dict[str, str | bool]:
    return {"operation": operation, "kernel": kernel, "available": reason is None, "reason": reason or ""}


def gemm_kernel(device: torch.device | str, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, dict[str, str]]:
    """Return the name of the GEMM kernel for two operands, each (format, granularity), and why others were refused."""
    kernel, refused = choose(probe_operand(a[1], a[0], device), probe_operand(b[1], b[0], device))
    return kernel.name, refused


def probe_operand(granularity: str, fmt: str, device: torch.device | str) -> Quantized:
    """Return the smallest matrix of that kind. A folded operand reaches the GEMM with a single scale.

    Raises:
        UnsupportedError: there is no such device here to be asked.
    """
    tile = granularity_named("tensor" if granularity == "column" else granularity)
    if is_planning():
        with FakeTensorMode():
            codes = torch.empty(128, 128, dtype=format_named(fmt).dtype, device="cuda")
            return Quantized(codes, torch.empty(tile.scale_shape(128, 128), device="cuda", dtype=torch.float32), tile)
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"no CUDA device is available. Plan for the CPU, or for a GPU by name: {', '.join(GPUS)}."
        )
    return quantize(torch.ones(128, 128, device=device, dtype=torch.float32), format_named(fmt), tile)
