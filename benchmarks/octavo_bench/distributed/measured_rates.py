"""Rates of one GPU, from committed results, for what the estimate of a step on many leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.flops import matmul_parameters
from octavo_bench import results
from octavo_bench.distributed.assumptions import Assumptions, Scheme

STACK = "llama-8b-stack"
"""The workload of kind `step` that rates are taken from."""


def measured(assumptions: Assumptions, directory: Path) -> Assumptions:
    """Return the assumptions with rates that they leave open taken from the newest results under `directory`.

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
    """Return rates from the step of a stack of blocks: operations and values by the milliseconds they took."""
    result = results.latest("step", directory)
    rows = () if result is None else result.rows
    row = next((r for r in rows if (r["workload"], r["implementation"]) == (STACK, scheme.implementation)), None)
    if row is None or not {"gemm_ms", "attention_ms", "elementwise_ms", "shape"} <= row.keys():
        return {}
    model, tokens, weights = _stack(row["shape"])
    values = tokens * model.layers * kept_values(model)
    kept = row["peak_gib"] * 2**30 - 2 * 2 * weights  # beside weights and gradients, both BF16 there
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
    result = results.latest("optimizer", directory)
    for row in () if result is None else result.rows:
        if (row["states"], row.get("weight")) == (scheme.states, scheme.weight) and "ms_clipped" in row:
            return {"optimizer_ps": row["ms_clipped"] * 1e9 / row["parameters"]}
    return {}


def kept_values(model: ModelConfig) -> int:
    """Return the values a token that a block keeps for backward, as plain PyTorch does with an attention in one kernel.

    Both inputs of residual sums, both outputs of norms, the attention's output; Q, K and V; the feed-forward's hidden
    values: gate, up and their product, or before and after GELU.
    """
    keys = model.key_value_heads * model.head_dim
    hidden = (3 if model.architecture == "llama" else 2) * model.ffn_dim
    return 5 * model.dim + model.dim + 2 * keys + hidden
