"""The summary of a run: what `summary.json` holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.train import device as devices
from octavo.train.config import RunConfig
from octavo.train.evaluate import perplexity
from octavo.train.events import gap_percent


def summarise(
    config: RunConfig,
    *,
    device: str,
    parameters: int,
    weight_bytes: float,
    state_bytes: float,
    heldout: Mapping[str, float],
    corpus: Mapping[str, Any],
    gemms: Mapping[str, int],
    fallbacks: Sequence[str],
    skipped: Mapping[str, int],
    history: Sequence[Mapping[str, Any]],
    seconds: float,
    memory: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary. Losses are in nats a token; a lane that was not trained has None.

    `weight_bytes` and `state_bytes` are those of the weights and of the optimizer's moments and masters, a parameter.
    `skipped_steps` counts by lane those that dynamic loss scaling left out. `tokens_per_second` and the milliseconds a
    step are medians over the log: compiling does not count. `memory` has the measured and the predicted peak.
    """
    losses = {f"heldout_loss_{lane}": heldout.get(lane) for lane in ("fp8", "bf16")}
    surprises = {
        f"perplexity_{lane}": perplexity(heldout[lane]) if lane in heldout else None for lane in ("fp8", "bf16")
    }
    times = {f"step_milliseconds_{lane}": _median(history, f"milliseconds_{lane}") for lane in ("fp8", "bf16")}
    return {
        "recipe": config.run.recipe,
        "device": device,
        "parameters": parameters,
        "weights": config.run.weights,
        "weight_bytes_per_parameter": weight_bytes,
        "optimizer_states": config.optimizer.states,
        "optimizer_bytes_per_parameter": state_bytes,
        "steps": config.run.steps,
        "tokens": config.tokens,
        **losses,
        **surprises,
        "gap_percent": gap_percent(heldout),
        "unigram_entropy": corpus.get("unigram_entropy"),
        "fp8_gemms": dict(gemms),
        "fp8_gemms_total": sum(gemms.values()),
        "fallbacks": list(fallbacks),
        "skipped_steps": dict(skipped),
        "tokens_per_second": _median(history, "tokens_per_second"),
        **times,
        "seconds": seconds,
        **memory,
        "corpus": dict(corpus),
        "versions": devices.versions(),
    }


def _median(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in history if line.get(key) is not None]
    return statistics.median(values) if values else None
