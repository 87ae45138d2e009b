"""A step on many GPUs, on paper, for every model, number of GPUs and scheme of the assumptions.

Rates of products, attention, element-wise passes and the optimizer are those of committed results, from one GPU
(`measured_rates`); links are stated (`assumptions`); `layouts` is the model. Nothing here was run on more GPUs than a
result says: the point of 4 GPUs is what such a measurement is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo import strict
from octavo_bench.distributed.assumptions import PEER, Assumptions
from octavo_bench.distributed.layouts import GIB, Case, Estimate, Layout, best, estimate

Row = dict[str, Any]

CHECK = ("8B", 4, 4 * 8192, Layout(tensor=1, stages=1, shard=4, replicas=1, sequences=1))
"""The point that is measured: model, GPUs, tokens, and the layout as it is run."""
CHECKED_BY = ("llama-3-8b", "data")
"""Workload and layout of its rows of kind `distributed`."""


def bench_scaling(assumptions: Assumptions, report: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Return one row for each model, number of GPUs and scheme, as the result kind `scaling` has them.

    The first row carries the assumptions. A case that fits on no layout has `error` in place of figures.

    Args:
        assumptions: with all rates known: see `measured`.
        report: called with each row as it comes.
    """
    rows: list[Row] = []
    points: list[tuple[str, int, int, Layout | None]] = [CHECK] if CHECK[0] in assumptions.models else []
    points += [(name, gpus, assumptions.batch_tokens, None) for name in assumptions.models for gpus in assumptions.gpus]
    for name, gpus, tokens, layout in points:
        peer = None
        for scheme in (PEER, *(other for other in assumptions.schemes if other != PEER)):
            case = case_of(assumptions, name, scheme, gpus, tokens)
            found = best(case) if layout is None else estimate(case, layout)
            row: Row = {"model": name, "gpus": gpus, "scheme": scheme, "batch_tokens": tokens}
            row |= {"error": "no layout fits"} if found is None else _figures(found, case)
            if scheme == PEER:
                peer = found
            if found is not None and peer is not None:
                alike = estimate(case, peer.layout).seconds
                row |= {"ratio_to_bf16": _round(peer.seconds / found.seconds)}
                row |= {"ratio_in_its_layout": _round(peer.seconds / alike)}
            rows.append(row if rows else row | {"assumptions": strict.to_dict(assumptions)})
            report(row)
    return rows


def case_of(assumptions: Assumptions, model: str, scheme: str, gpus: int, batch_tokens: int) -> Case:
    """Return one case of the assumptions, whose rates must be known."""
    head = assumptions.schemes[PEER].gemm_tflops
    assert head is not None
    return Case(
        model=assumptions.models[model],
        scheme=assumptions.schemes[scheme],
        head_tflops=head,
        assumptions=assumptions,
        gpus=gpus,
        batch_tokens=batch_tokens,
    )


def _figures(found: Estimate, case: Case) -> Row:
    times = {name: _round(1e3 * getattr(found, name)) for name in ("compute", "bubble", "communication", "exposed")}
    return {
        "layout": str(found.layout),
        "ms": _round(1e3 * found.seconds),
        **{f"{name}_ms": value for name, value in times.items()},
        "tokens_per_s_per_gpu": _round(case.batch_tokens / found.seconds / case.gpus),
        "peak_gib": _round(sum(found.memory.values()) / GIB),
        "memory_gib": {kind: _round(size / GIB) for kind, size in found.memory.items()},
        "wire_gb": _round(sum(found.sent[kind] for kind in ("weights", "gradients")) / 1e9),
        "sent_gb": {kind: _round(size / 1e9) for kind, size in found.sent.items()},
    }


def _round(value: float) -> float:
    return float(f"{value:.5g}")
