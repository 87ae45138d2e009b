"""The content of `summary.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.monitor.system import versions
from octavo.train.config import RunConfig
from octavo.train.evaluate import paired_interval, perplexity
from octavo.train.events import MODELS, gap_percent


def summarise(
    config: RunConfig,
    facts: Mapping[str, Any],
    heldout: Mapping[str, Sequence[float]],
    corpus: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run. Losses are in nats per token; None for a model that was not trained.

    Speeds are medians over the log, which excludes compilation.

    Args:
        config: the run.
        facts: `device`, `parameters`, bytes per parameter of weights and of optimizer states, FP8 GEMMs, fallbacks,
            steps skipped by dynamic loss scaling, accuracy by task, `seconds`, and `energy_kwh` of all GPUs.
        heldout: by model: held-out loss of each sequence.
        corpus: facts of the text.
        history: lines of `metrics.jsonl`.
        memory: measured and predicted peak.
    """
    means = {model: statistics.fmean(losses) for model, losses in heldout.items()}
    half_width = paired_interval(heldout["fp8"], heldout["bf16"])[1] if len(means) == 2 else None
    perplexities = {f"perplexity_{m}": perplexity(means[m]) if m in means else None for m in MODELS}
    return {
        "recipe": config.run.recipe,
        **facts,
        "weights": config.run.weights,
        "optimizer_states": config.optimizer.states,
        "steps": config.run.steps,
        "tokens": config.tokens,
        **{f"heldout_loss_{model}": means.get(model) for model in MODELS},
        **perplexities,
        "gap_percent": gap_percent(means),
        "gap_95_percent": None if half_width is None else 100 * half_width / means["bf16"],
        "unigram_entropy": corpus.get("unigram_entropy"),
        "fp8_gemms_total": sum(facts["fp8_gemms"].values()),
        "tokens_per_second": _median(history, "tokens_per_second"),
        **{f"step_milliseconds_{model}": _median(history, f"milliseconds_{model}") for model in MODELS},
        "energy_cost": None if facts["energy_kwh"] is None else facts["energy_kwh"] * config.run.price_per_kwh or None,
        **memory,
        "corpus": dict(corpus),
        "versions": versions(),
    }


def _median(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in history if line.get(key) is not None]
    return statistics.median(values) if values else None
