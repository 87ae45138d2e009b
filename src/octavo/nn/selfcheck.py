"""Is the arithmetic of this machine right? Every recipe's three GEMMs against FP64, on normal data.

The floors are a decibel or two under what quantisation to the format allows, so that a wrong scale, a wrong layout or a
lossy accumulation fails while an honest kernel passes.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo import kernels
from octavo.nn.functional import linear
from octavo.numerics import sqnr_db, sqnr_per_row_db
from octavo.recipes import load, names

FLOOR_DB = {"e4m3": 27.0, "e5m2": 23.0}
"""Lowest acceptable signal to noise ratio, by the coarser format of the GEMM's two operands."""

TOKENS, OUT_FEATURES, IN_FEATURES = 264, 200, 392  # odd enough that every kernel has something to pad


def selfcheck(device: torch.device | str) -> list[dict[str, Any]]:
    """Return one row a recipe and GEMM: kernel, sqnr_db, worst_row_db (the worst row on its own), floor_db, passed."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, IN_FEATURES), (OUT_FEATURES, IN_FEATURES), (TOKENS, OUT_FEATURES))
    )
    exact = {"fprop": x @ weight.t(), "dgrad": gradient @ weight, "wgrad": gradient.t() @ x}
    rows = []
    for name in names():
        recipe = load(name)
        if not recipe.is_fp8:
            continue
        leaf_x, leaf_weight = (t.float().to(device).requires_grad_() for t in (x, weight))
        with kernels.record() as ledger:
            y = linear(leaf_x, leaf_weight, None, recipe)
            y.backward(gradient.float().to(device))
        got = {"fprop": y.detach(), "dgrad": leaf_x.grad, "wgrad": leaf_weight.grad}
        for gemm, a, b in recipe.gemms():
            floor = FLOOR_DB["e5m2" if "e5m2" in (a.format, b.format) else "e4m3"]
            rows.append(
                {
                    "recipe": name,
                    "gemm": gemm,
                    "kernel": "+".join(ledger.gemms),
                    **_compare(exact[gemm], got[gemm], floor),
                }
            )
    return rows


def _compare(exact: torch.Tensor, got: torch.Tensor | None, floor: float) -> dict[str, Any]:
    assert got is not None
    result = got.double().cpu()
    whole, worst = sqnr_db(exact, result), float(sqnr_per_row_db(exact, result).min())
    return {
        "sqnr_db": whole,
        "worst_row_db": worst,
        "floor_db": floor,
        "passed": whole >= floor and worst >= floor - 2,
    }
