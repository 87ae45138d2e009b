"""Slow accumulation: is it slow here? Sums of one sign, which a lossy accumulator shrinks, against exact ones.

docs/explanation/accumulation.md says what the two are. That a GPU's library takes the flag for slow and sums fast is a
fault that no loss curve shows: weights grow used to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo import kernels
from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Machine
from octavo.kernels.gemm import choose
from octavo.kernels.reference import accumulator
from octavo.numerics import Quantized

TERMS = 16384
"""Of a sum."""
LIMIT = 1e-3
"""Largest relative error of the mean that slow accumulation may have: about twice what cutting 128 products does."""
_PAIRS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}


@check(
    "accumulation",
    symptom="a checkpoint is worse on other hardware or in BF16 than it was in training",
    remedy="This build of PyTorch sums fast where slow was asked for: train with another one, or with recipe 'block'.",
)
def accumulation(machine: Machine) -> Finding:
    """Sum products of one sign on this device, slow and fast, and compare with FP64."""
    rows = [_measured(name, machine.device) for name in _PAIRS]
    slow = {row["scales"]: row["slow"] for row in rows}
    worst = max(slow, key=lambda name: abs(slow[name]))
    fast = max((row["fast"] for row in rows), key=abs)
    seen = f"over {TERMS} terms slow sums are off by {100 * slow[worst]:+.3f} %, fast ones by {100 * fast:+.2f} %"
    found = failure if not abs(slow[worst]) <= LIMIT else ok
    return found(f"{seen} ({worst})" if found is failure else seen, rows=rows, slow=slow[worst], fast=fast, limit=LIMIT)


def _measured(name: str, device: torch.device) -> dict[str, Any]:
    """Return the mean relative error of slow and of fast sums, with scales of one granularity."""
    rows = 1024 if device.type == "cuda" else 16  # below that, cuBLAS splits sums
    generator = torch.Generator().manual_seed(0)
    a, b = (kernels.quantize(_of_one_sign(rows, generator).to(device), "e4m3", kind) for kind in _PAIRS[name])
    errors = {how: _error(a, b, how) for how in ("slow", "fast")}
    return {"scales": name, "kernel": choose(a, b)[0].name, **errors}


def _of_one_sign(rows: int, generator: torch.Generator) -> Tensor:
    """Return positive numbers, rows of many sizes, so that roundings of the sums to BF16 cancel in their mean."""
    return (torch.rand(rows, TERMS, generator=generator) + 0.5) * (1 + torch.rand(rows, 1, generator=generator))


def _error(a: Quantized, b: Quantized, accumulate: str) -> float:
    """Return the mean of what a sum is off by, relative to itself."""
    exact = accumulator.exact(a, b, torch.float32).double()
    return float((kernels.gemm(a, b, torch.float32, accumulate).double() / exact - 1).mean())
