"""Which kernel would run, and why not another: answered by asking the kernels themselves with the smallest operands."""

from __future__ import annotations

import torch

from octavo.errors import UnsupportedError
from octavo.kernels.gemm import KERNELS, choose
from octavo.numerics import Quantized, format_named, granularity_named, quantize


def explain(device: torch.device | str) -> list[dict[str, str | bool]]:
    """Return for every GEMM kernel whether this device can run it: `operation`, `kernel`, `available`, `reason`."""
    probes = {
        "scaled_mm.tensor": ("tensor", "tensor"),
        "scaled_mm.row": ("row", "row"),
        "scaled_mm.block": ("1x128", "128x128"),
        "reference": ("1x32", "1x32"),
    }
    rows: list[dict[str, str | bool]] = []
    for kernel in KERNELS:
        a, b = (probe_operand(name, "e4m3", device) for name in probes[kernel.name])
        reason = kernel.refuses(a, b)
        rows.append({"operation": "gemm", "kernel": kernel.name, "available": reason is None, "reason": reason or ""})
    return rows


def gemm_kernel(device: torch.device | str, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, dict[str, str]]:
    """Return the name of the GEMM kernel for two operands, each (format, granularity), and why others were refused."""
    kernel, refused = choose(probe_operand(a[1], a[0], device), probe_operand(b[1], b[0], device))
    return kernel.name, refused


def probe_operand(granularity: str, fmt: str, device: torch.device | str) -> Quantized:
    """Return the smallest matrix of that kind. A folded operand reaches the GEMM with a single scale.

    Raises:
        UnsupportedError: there is no such device here to be asked.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device here to ask what it can run: plan where there is one.")
    tile = granularity_named("tensor" if granularity == "column" else granularity)
    return quantize(torch.ones(128, 128, device=device), format_named(fmt), tile)
