"""Checks of computation: the kernels in use, their arithmetic and compilers, the accumulation of FP8 GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.kernels.gemm import accumulator, choose
from octavo.kernels.runtime.dispatch import triton_unsupported_reason
from octavo.kernels.selfcheck import check_kernels
from octavo.lab.doctor.check import Finding, check, failure, ok
from octavo.lab.doctor.subjects import Machine, a_gpu
from octavo.lab.monitor.system import versions
from octavo.nn.functional import linear
from octavo.numerics import sqnr_db, sqnr_per_row_db
from octavo.recipes import load, names


@check(
    "kernels",
    symptom="FP8 is many times slower than BF16",
    remedy="Install triton on a GPU with FP8 (compute capability 8.9 or later), and leave OCTAVO_TRITON unset.",
)
def choice(machine: Machine) -> Finding:
    """List the kernel that each operation uses. On a GPU, the reference is a fault."""
    rows = kernels.explain(machine.device)
    chosen = {row["operation"]: row["kernel"] for row in reversed(rows) if row["available"]}
    by_kernel = _merged(rows)
    gemms = [str(row["kernel"]) for row in rows if row["operation"] == "gemm" and row["available"]]
    slow = sorted(str(operation) for operation, kernel in chosen.items() if kernel == "reference")
    if slow and machine.device.type == "cuda":
        why = next(str(row["reason"]) for row in rows if row["operation"] == slow[0] and row["reason"])
        return failure(f"{', '.join(slow)} run as the reference: {why}", rows=by_kernel)
    return ok(f"GEMMs: {', '.join(gemms)}; other kernels: {chosen['quantize']}", rows=by_kernel)


def _merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of operations that differ in nothing else; the reference comes last."""
    operations: dict[tuple[Any, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["kernel"] == "reference"):
        operations.setdefault((row["kernel"], row["available"], row["reason"]), []).append(row["operation"])
    return [
        {"kernel": kernel, "operations": ", ".join(names), "available": available, "reason": reason}
        for (kernel, available, reason), names in operations.items()
    ]


@check(
    "arithmetic",
    symptom="the loss in FP8 is far above that in BF16 from the first step",
    remedy="A kernel computes wrong results. Try other versions of torch and triton, and report it with --report.",
)
def arithmetic(machine: Machine) -> Finding:
    """Compute the three GEMMs of every recipe, and compare each with FP64."""
    rows = selfcheck(machine.device)
    wrong = [f"{row['recipe']} {row['gemm']} {row['sqnr_db']:.1f} dB" for row in rows if not row["passed"]]
    worst = min(rows, key=lambda row: row["sqnr_db"] - row["floor_db"])
    if wrong:
        return failure(f"too far from FP64: {', '.join(wrong)}", rows=rows)
    recipes = len({row["recipe"] for row in rows})
    seen = f"{recipes} recipes; smallest margin: {worst['recipe']} {worst['gemm']} at {worst['sqnr_db']:.1f} dB"
    return ok(seen, rows=rows, recipe=worst["recipe"], sqnr_db=worst["sqnr_db"], floor_db=worst["floor_db"])


@check(
    "triton kernels",
    symptom="wrong numbers, or a compiler error, after a change of triton or the driver",
    remedy="Install another version of triton, or set OCTAVO_TRITON=0 for the slower reference kernels.",
    needs=lambda machine: triton_unsupported_reason(machine.device) or "",
)
def triton(machine: Machine) -> Finding:
    """Compile every Triton kernel, and compare it with its PyTorch reference."""
    rows = check_kernels(machine.device)
    failed = [row for row in rows if not row["passed"]]
    if not failed:
        return ok(f"{len({row['kernel'] for row in rows})} kernels match their references in {len(rows)} cases")
    names = ", ".join(dict.fromkeys(str(row["kernel"]) for row in failed))
    remedy = (
        f"Triton {versions()['triton']} does not compile {names} correctly for this GPU. Install another version of "
        "triton, or set OCTAVO_TRITON=0 for the slower reference kernels, and report it with --report."
    )
    seen = f"{names}: {failed[0]['case']}: {failed[0]['detail']}"
    return failure(seen, remedy=remedy, rows=_by_kernel(rows), failed=len(failed), cases=len(rows))


def _by_kernel(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per kernel, followed by its failed cases."""
    shown: list[dict[str, Any]] = []
    for kernel, group in groupby(rows, key=lambda row: row["kernel"]):
        cases = list(group)
        passed = sum(row["passed"] for row in cases)
        shown.append({"kernel": kernel, "cases": f"{passed} of {len(cases)} passed", "detail": ""})
        shown += [{"kernel": "", "cases": row["case"], "detail": row["detail"]} for row in cases if not row["passed"]]
    return shown


# Slow accumulation: sums of one sign, which a truncating accumulator shrinks, against exact ones. See
# docs/explanation/accumulation.md. A library that takes the flag for slow accumulation and sums fast is a fault that no
# loss curve shows: the weights adapt to it.
SUM_TERMS = 16384
"""Terms per sum."""
SUM_LIMIT = 1e-3
"""Largest relative error of the mean for slow accumulation: about twice that of truncating 128 products."""
_PAIRS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("1x128", "128x128")}


@check(
    "accumulation",
    symptom="a checkpoint is worse on other hardware or in BF16 than it was in training",
    remedy="This build of PyTorch accumulates fast where slow was requested: use another build, or the recipe 'block'.",
)
def accumulation(machine: Machine) -> Finding:
    """Sum products of one sign on this device, with slow and fast accumulation, and compare with FP64."""
    rows = [_sum_errors(name, machine.device) for name in _PAIRS]
    slow = {row["scales"]: row["slow"] for row in rows}
    worst = max(slow, key=lambda name: abs(slow[name]))
    fast = max((row["fast"] for row in rows), key=abs)
    seen = (
        f"over {SUM_TERMS} terms, slow sums are off by {100 * slow[worst]:+z.3f} %, fast ones by {100 * fast:+z.2f} %"
    )
    found = failure if not abs(slow[worst]) <= SUM_LIMIT else ok
    return found(
        f"{seen} ({worst})" if found is failure else seen, rows=rows, slow=slow[worst], fast=fast, limit=SUM_LIMIT
    )


def _sum_errors(name: str, device: torch.device) -> dict[str, Any]:
    """Return the mean relative errors of slow and fast sums, for scales of one granularity."""
    rows = 1024 if device.type == "cuda" else 16  # cuBLAS splits the sums of smaller matrices
    generator = torch.Generator().manual_seed(0)
    a, b = (kernels.quantize(_of_one_sign(rows, generator).to(device), "e4m3", kind) for kind in _PAIRS[name])
    exact = accumulator.exact(a, b, torch.float32).double()
    errors = {
        how: float((kernels.gemm(a, b, torch.float32, how).double() / exact - 1).mean()) for how in ("slow", "fast")
    }
    return {"scales": name, "kernel": choose(a, b)[0].name, **errors}


def _of_one_sign(rows: int, generator: torch.Generator) -> Tensor:
    """Return positive numbers in rows of varied magnitude, so that rounding the sums to BF16 cancels in the mean."""
    return (torch.rand(rows, SUM_TERMS, generator=generator) + 0.5) * (1 + torch.rand(rows, 1, generator=generator))


TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""Relative to the largest value, 2^-17. A sum of 64 numbers of one sign in another order differs by at most 32 epsilon,
a fused multiply-add, an approximate exp or a division by a few. An intermediate in FP16 or TF32 differs by up to 2^-11,
64 times as much; a missing or repeated element by far more."""
ROW = 64
"""Terms per sum."""

Outputs = tuple[Tensor, Tensor]


@check(
    "compiler",
    symptom="a run stops in its first step with an error from inductor, gcc or ptxas",
    remedy="Install a C compiler (gcc) and Python's headers, or train with --compile off.",
    needs=a_gpu,
    read=lambda machine: [
        outputs(function, inputs(machine.device))
        for function in (scaled_silu, torch.compile(scaled_silu, fullgraph=True))
    ],
)
def compiler(read: Sequence[Outputs]) -> Finding:
    """Judge the eager and compiled results of a small function, forward and backward."""
    forward, backward = (float((a - b).abs().max() / a.abs().max()) for a, b in zip(*read, strict=True))
    found = ok if forward <= TOLERANCE and backward <= TOLERANCE else failure  # a NaN fails too
    seen = f"compiled results differ by {forward:.1e} of the largest value, gradients by {backward:.1e}"
    return found(seen, forward=forward, backward=backward, limit=TOLERANCE)


def inputs(device: torch.device) -> Tensor:
    """Return FP32 values from 1 to 4, (64, ROW)."""
    return torch.linspace(1, 4, 64 * ROW, device=device).reshape(64, ROW)


def outputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Outputs:
    """Return y = function(x) and the gradient of its sum of squares, both shaped as x."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def scaled_silu(x: Tensor) -> Tensor:
    """Return silu(x) times the mean of each row: elementwise operations and sums to fuse."""
    return nn.functional.silu(x) * x.mean(dim=1, keepdim=True)


# The arithmetic of every recipe's three GEMMs, against FP64 on normal data. The floors are a decibel or two under what
# quantisation to the format allows, so that a wrong scale, a wrong layout or a lossy accumulation fails while an honest
# kernel passes.
FLOOR_DB = {"e4m3": 27.0, "e5m2": 23.0}
"""Lowest acceptable signal to noise ratio, by the coarser format of the GEMM's two operands."""

TOKENS, OUT_FEATURES, IN_FEATURES = 264, 200, 392  # odd enough that every kernel has something to pad


def selfcheck(device: torch.device | str) -> list[dict[str, Any]]:
    """Return one row per recipe and GEMM: kernel, sqnr_db, worst_row_db (that of the worst row), floor_db, passed."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, IN_FEATURES), (OUT_FEATURES, IN_FEATURES), (TOKENS, OUT_FEATURES))
    )
    exact = {"fprop": x @ weight.t(), "dgrad": gradient @ weight, "wgrad": gradient.t() @ x}
    rows = []
    for recipe in (recipe for recipe in map(load, names()) if recipe.is_fp8):
        leaf_x, leaf_weight = (t.float().to(device).requires_grad_() for t in (x, weight))
        with kernels.record() as ledger:
            y = linear(leaf_x, leaf_weight, None, recipe)
            y.backward(gradient.float().to(device))
        got = {"fprop": y.detach(), "dgrad": leaf_x.grad, "wgrad": leaf_weight.grad}
        for gemm, a, b in recipe.gemms():
            floor, result = FLOOR_DB["e5m2" if "e5m2" in (a.format, b.format) else "e4m3"], got[gemm]
            assert result is not None
            pair = exact[gemm], result.double().cpu()
            whole, worst = sqnr_db(*pair), float(sqnr_per_row_db(*pair).min())
            how: dict[str, Any] = {"recipe": recipe.name, "gemm": gemm, "kernel": "+".join(ledger.gemms)}
            limits = {"floor_db": floor, "passed": whole >= floor and worst >= floor - 2}
            rows.append({**how, "sqnr_db": whole, "worst_row_db": worst, **limits})
    return rows
