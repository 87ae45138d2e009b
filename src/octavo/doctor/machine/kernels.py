"""FP8 kernels: which run here, whether their arithmetic is right, and whether Triton compiles them correctly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from octavo import kernels
from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Machine
from octavo.kernels.dispatch import why_not
from octavo.kernels.selfcheck import check_kernels
from octavo.nn.selfcheck import selfcheck
from octavo.train.device import versions


@check(
    "kernels",
    symptom="FP8 is many times slower than BF16",
    remedy="Install triton on a GPU with FP8 (compute capability 8.9 or later), and leave OCTAVO_TRITON unset.",
)
def choice(machine: Machine) -> Finding:
    """Ask every operation which of its kernels runs. On a GPU the reference is a fault."""
    rows = kernels.explain(machine.device)
    chosen = {row["operation"]: row["kernel"] for row in reversed(rows) if row["available"]}
    by_kernel = _merged(rows)
    gemms = [str(row["kernel"]) for row in rows if row["operation"] == "gemm" and row["available"]]
    slow = sorted(str(operation) for operation, kernel in chosen.items() if kernel == "reference")
    if slow and machine.device.type == "cuda":
        why = next(str(row["reason"]) for row in rows if row["operation"] == slow[0] and row["reason"])
        return failure(f"the reference computes {', '.join(slow)}: {why}", rows=by_kernel)
    return ok(f"products: {', '.join(gemms)}; passes: {chosen['quantize']}", rows=by_kernel)


def _merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for all operations whose rows are otherwise the same; the reference, which takes all, is last."""
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
    remedy="A kernel computes wrongly. Try other versions of torch and triton, and report it with --report.",
)
def arithmetic(machine: Machine) -> Finding:
    """Compute the three products of every recipe, and compare each with FP64."""
    rows = selfcheck(machine.device)
    wrong = [f"{row['recipe']} {row['gemm']} {row['sqnr_db']:.1f} dB" for row in rows if not row["passed"]]
    worst = min(rows, key=lambda row: row["sqnr_db"] - row["floor_db"])
    if wrong:
        return failure(f"too far from FP64: {', '.join(wrong)}", rows=rows)
    recipes = len({row["recipe"] for row in rows})
    seen = f"{recipes} recipes, the least above its floor {worst['recipe']} {worst['gemm']} {worst['sqnr_db']:.1f} dB"
    return ok(seen, rows=rows, recipe=worst["recipe"], sqnr_db=worst["sqnr_db"], floor_db=worst["floor_db"])


def _triton(machine: Machine) -> str:
    return why_not(machine.device) or ""


@check(
    "triton kernels",
    symptom="wrong numbers, or an error of a compiler, after triton or the driver was changed",
    remedy="Install another version of triton, or set OCTAVO_TRITON=0, which runs the slower reference kernels.",
    needs=_triton,
)
def triton(machine: Machine) -> Finding:
    """Compile every Triton kernel, and compare it with its twin in PyTorch."""
    rows = check_kernels(machine.device)
    failed = [row for row in rows if not row["passed"]]
    if not failed:
        return ok(f"{len({row['kernel'] for row in rows})} kernels equal their twins in {len(rows)} cases")
    names = ", ".join(dict.fromkeys(str(row["kernel"]) for row in failed))
    remedy = (
        f"Triton {versions()['triton']} does not compile {names} correctly for this GPU. Install another version of "
        "triton, or set OCTAVO_TRITON=0, which runs the slower reference kernels; and report it with --report."
    )
    seen = f"{names}: {failed[0]['case']}: {failed[0]['detail']}"
    return failure(seen, remedy=remedy, rows=_by_kernel(rows), failed=len(failed), cases=len(rows))


def _by_kernel(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a kernel, and below it one a case that failed."""
    shown: list[dict[str, Any]] = []
    for kernel, group in groupby(rows, key=lambda row: row["kernel"]):
        cases = list(group)
        passed = sum(row["passed"] for row in cases)
        shown.append({"kernel": kernel, "cases": f"{passed} of {len(cases)} passed", "detail": ""})
        shown += [{"kernel": "", "cases": row["case"], "detail": row["detail"]} for row in cases if not row["passed"]]
    return shown
