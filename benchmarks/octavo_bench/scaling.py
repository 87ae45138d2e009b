"""Estimate of a step on many GPUs, for every model, number of GPUs and scheme of the assumptions.

Rates of GEMMs, attention, element-wise passes and the optimizer are those of committed results from one GPU
(`measured`); links are stated (`assumptions`); `layouts` is the model. Nothing here was run on more GPUs than a result
says: the 4-GPU point is compared with such a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo._util import config_reader
from octavo.errors import ConfigError
from octavo.lab.memory.forecast import GIB
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.flops import matmul_parameters
from octavo_bench import results
from octavo_bench.assumptions import PEER, Assumptions, Scheme, load
from octavo_bench.kind import TO_STDOUT, Output
from octavo_bench.layouts import Case, Estimate, Layout, best, estimate, kept_values
from octavo_bench.results import PAPER, Row
from octavo_bench.scaling_tables import CHECK, KIND


def bench_scaling(assumptions: Assumptions) -> Iterator[Row]:
    """Yield one row for each model, number of GPUs and scheme.

    The first row carries the assumptions. A case that fits in no layout has `error` in place of figures.

    Args:
        assumptions: with all rates known: see `measured`.
    """
    first: Row = {"assumptions": config_reader.to_dict(assumptions)}
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
            yield row | first
            first = {}


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


STACK = "llama-8b-stack"
"""Workload of kind `step` that provides the rates."""


def measured(assumptions: Assumptions, directory: Path) -> Assumptions:
    """Return the assumptions with missing rates filled in from the newest results under `directory`.

    Raises:
        ConfigError: a rate is needed and was not measured.
    """
    return replace(
        assumptions,
        schemes={name: _with_rates(name, scheme, directory) for name, scheme in assumptions.schemes.items()},
    )


def _with_rates(name: str, scheme: Scheme, directory: Path) -> Scheme:
    names = ("gemm_tflops", "attention_tflops", "elementwise_ps", "optimizer_ps", "activation_bytes")
    missing = [rate for rate in names if getattr(scheme, rate) is None]
    if not missing:
        return scheme
    found = {**_step_rates(scheme, directory), **_optimizer_rate(scheme, directory)}
    if unknown := [rate for rate in missing if rate not in found]:
        raise ConfigError(
            f"scaling: scheme '{name}' has no {', '.join(unknown)}, and the results under {directory} have no "
            f"'{scheme.implementation}' of {STACK}, or no optimizer '{scheme.states}' of {scheme.weight}: measure "
            "them, or state them in the file."
        )
    rates: dict[str, Any] = {rate: float(f"{found[rate]:.5g}") for rate in missing}
    return replace(scheme, **rates)


def _step_rates(scheme: Scheme, directory: Path) -> dict[str, float]:
    """Return rates from the step of a stack of blocks: FLOPs and values over their milliseconds."""
    rows = [row for result in results.on_one_machine("step", directory) for row in result.rows]
    row = next((r for r in rows if (r["workload"], r["implementation"]) == (STACK, scheme.implementation)), None)
    if row is None or not {"gemm_ms", "attention_ms", "elementwise_ms", "shape"} <= row.keys():
        return {}
    model, tokens, weights = _stack(row["shape"])
    values = tokens * model.layers * kept_values(model)
    kept = row["peak_gib"] * 2**30 - 2 * 2 * weights  # besides weights and gradients, both BF16 there
    return {
        "gemm_tflops": 6 * tokens * weights / row["gemm_ms"] / 1e9,
        "attention_tflops": 6 * tokens * model.layers * model.dim * model.sequence / row["attention_ms"] / 1e9,
        "elementwise_ps": row["elementwise_ms"] * 1e9 / values,
        "activation_bytes": kept / values,
    }


def _stack(shape: Mapping[str, Any]) -> tuple[ModelConfig, int, int]:
    """Return the model of a workload without head, its tokens and its weights."""
    keys = ("dim", "ffn", "heads", "kv_heads", "layers", "sequence")
    model = ModelConfig(vocab=1, **{key: shape[key] for key in keys})
    return model, shape["batch"] * shape["sequence"], matmul_parameters(model) - model.dim


def _optimizer_rate(scheme: Scheme, directory: Path) -> dict[str, float]:
    for row in (row for result in results.newest("optimizer", directory) for row in result.rows):
        if (row["states"], row.get("weight")) == (scheme.states, scheme.weight) and "ms_clipped" in row:
            return {"optimizer_ps": row["ms_clipped"] * 1e9 / row["parameters"]}
    return {}


def command(
    file: Path | None = None,
    /,
    *,
    results: Annotated[Path, Parameter(negative=())] = Path("benchmarks/results"),
    output: Output = TO_STDOUT,
) -> int:
    """Estimate a step on 64, 512 and 4096 GPUs, in FP8 and in BF16, from measured rates and stated links.

    Nothing is measured: every layout that fits is estimated, and the fastest shown. The assumptions are in the result.

    Examples:

        octavo bench scaling
        octavo bench scaling --write benchmarks/results
        octavo bench scaling slow-network.toml

    Parameters
    ----------
    file
        Assumptions to override, in TOML; the others are as listed in docs/explanation/scaling.md.
    results
        Directory of the result files with the rates of one GPU.
    """
    rows = bench_scaling(measured(load(file), results))
    output.keep(KIND, rows, *([file.name] if file else []), machine=PAPER)
    return 0  # a model that fits in no layout is a result
