"""The summary of a run: the content of `summary.json`, and its report in a terminal with the next commands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from octavo._util.terminal import filled
from octavo.lab.monitor.gap import fluctuation, judge_gap
from octavo.lab.monitor.system import versions
from octavo.lab.train.config import RunConfig
from octavo.lab.train.control import control_of, study_of
from octavo.lab.train.evaluate import paired_interval, perplexity, within
from octavo.lab.train.events import MODELS, Finished, gap_percent
from octavo.lab.train.plot import plot

HIGH = "high_precision"
"""Name of the FP8 model's weights, computed in high precision."""


def summarise(
    config: RunConfig,
    facts: Mapping[str, Any],
    heldout: Mapping[str, Sequence[float]],
    corpus: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run. Losses are in nats per token; None for a model that was not trained.

    A perplexity that is infinite is None, too: JSON has no infinity.

    Speeds are medians over the log, which excludes compilation, from the step on that the FP8 model leaves BF16.

    Args:
        config: the run.
        facts: `device`, `parameters`, bytes per parameter of weights and of optimizer states, 8-bit GEMMs, fallbacks,
            steps skipped by dynamic loss scaling, accuracy by task, `seconds`, and `energy_kwh` of all GPUs.
        heldout: by model: held-out loss of each sequence. `HIGH`: of the FP8 model's weights, computed without FP8.
        corpus: facts of the text.
        history: lines of `metrics.jsonl`.
        memory: measured and predicted peak.
    """
    means = {model: statistics.fmean(losses) for model, losses in heldout.items()}
    gap = gap_percent(means)
    half_width = None if gap is None else paired_interval(heldout["fp8"], heldout["bf16"])[1]
    timed = [line for line in history if not config.run.is_bf16(line["step"] - 1)] or history
    found = {model: perplexity(loss) for model, loss in means.items()}
    perplexities = {f"perplexity_{m}": found[m] if math.isfinite(found.get(m, math.inf)) else None for m in MODELS}
    return {
        "recipe": config.run.recipe,
        **facts,
        "weights": config.run.weights,
        "optimizer_states": config.optimizer.states,
        "steps": config.run.steps,
        "tokens": config.tokens,
        **{f"heldout_loss_{model}": means.get(model) for model in (*MODELS, HIGH)},
        **perplexities,
        "gap_percent": gap,
        "gap_95_percent": None if half_width is None else 100 * half_width / means["bf16"],
        "gap_fluctuation_percent": None if gap is None else _fluctuation(history) or None,
        **({**control_of(config), **study_of(config)} if gap is not None else {}),
        "unigram_entropy": corpus.get("unigram_entropy"),
        "fp8_gemms_total": sum(facts["fp8_gemms"].values()),
        "tokens_per_second": _median(timed, "tokens_per_second"),
        **{f"step_milliseconds_{model}": _median(timed, f"milliseconds_{model}") for model in MODELS},
        "energy_cost": None if facts["energy_kwh"] is None else facts["energy_kwh"] * config.run.price_per_kwh or None,
        **memory,
        "corpus": dict(corpus),
        "versions": versions(),
    }


def _median(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in history if line.get(key) is not None]
    return statistics.median(values) if values else None


def final_report(
    console: Console, event: Finished, commands: Sequence[tuple[str, str]], program: str = "octavo"
) -> None:
    """Print the loss curves, the results, the next commands and a verdict.

    Args:
        commands: purpose, and what follows `octavo`.
        program: how to call `octavo`.
    """
    curves = {
        f"loss {title}": [
            (line["step"], line[f"loss_{model}"]) for line in event.history if line.get(f"loss_{model}") is not None
        ]
        for model, title in MODELS.items()
    }
    console.print()
    switches = [line["step"] for line in event.history if "recipe_fp8" in line]
    drawn = plot({name: points for name, points in curves.items() if points}, marks={"change of recipe": switches})
    console.print(drawn, soft_wrap=True)
    console.print()
    for label, value in _facts(event):
        console.print(f"{label:<22}{value}", markup=False, soft_wrap=True)
    console.print("\nNext", markup=False)
    for purpose, command in commands:
        console.print(f"  {purpose:<20}{program} {command}", markup=False, soft_wrap=True)
    if said := judge_gap(event.summary).text:
        console.print(f"\n{filled(said, min(console.width, 100))}", style="bold", markup=False, soft_wrap=True)


def _fluctuation(history: Sequence[Mapping[str, Any]]) -> float:
    return fluctuation([line["gap_percent"] for line in history if line.get("gap_percent") is not None])


def _facts(event: Finished) -> Iterator[tuple[str, str]]:
    summary = event.summary
    for model, title in MODELS.items():
        loss = summary[f"heldout_loss_{model}"]
        if loss is not None:
            surprise = summary[f"perplexity_{model}"]
            told = "infinite" if surprise is None else f"{surprise:.3f}"
            yield f"held-out loss {title}", f"{loss:.4f} nats per token, perplexity {told}"
        if model == "fp8" and (same := summary.get(f"heldout_loss_{HIGH}")) is not None:
            yield "  without FP8", f"{same:.4f} nats per token, by the same weights"
    for task, found in summary.get("tasks", {}).items():
        shown = (
            f"{title} {100 * found[m]:.1f}{within(100 * found[f'{m}_error'], found['samples'], '.1f')} %"
            for m, title in MODELS.items()
            if m in found
        )
        yield f"answered {task}"[:21], f"{', '.join(shown)} of {found['samples']:,}"
    if summary["gap_percent"] is not None:
        yield "gap", f"{summary['gap_percent']:+z.3f} % (FP8 relative to BF16)"
    if summary["unigram_entropy"] is not None:
        yield (
            "unigram entropy",
            f"{summary['unigram_entropy']:.4f} nats per token (by token frequencies alone)",
        )
    for model, title in MODELS.items():
        if summary["skipped_steps"].get(model):
            yield f"skipped steps {title}", f"{summary['skipped_steps'][model]} (their gradients overflowed)"
    speed = f"median {summary['tokens_per_second'] or math.nan:,.0f} tokens/s"
    yield "trained on", f"{summary['tokens']:,} tokens in {_duration(summary['seconds'])}, {speed}"
    if times := _step_times(summary):
        yield "time per step", times
    if summary.get("energy_kwh") is not None:
        cost = "" if summary.get("energy_cost") is None else f", which cost {summary['energy_cost']:.4g}"
        yield "energy", f"{summary['energy_kwh']:.4g} kWh of the GPUs, all models{cost}"
    if summary["weights"] != "fp32":
        yield "weights", f"{summary['weights']}, {summary['weight_bytes_per_parameter']:.2f} bytes per parameter"
    if summary["optimizer_states"] != "fp32" or summary["weights"] != "fp32":
        taken = f"{summary['optimizer_bytes_per_parameter']:.2f} bytes per parameter"
        yield "optimizer states", f"{summary['optimizer_states']}, {taken}"
    if summary["heldout_loss_fp8"] is not None:
        gemms = (f"{count:,} {kernel}" for kernel, count in sorted(summary["fp8_gemms"].items()))
        yield "8-bit GEMMs run", ", ".join(gemms) or "none"
        yield "fallbacks", "; ".join(summary["fallbacks"]) or "none"
    yield "stored in", str(event.directory)


def _step_times(summary: Mapping[str, Any]) -> str:
    """Return the time per step of each model, with the reason where FP8 gains next to nothing on a GPU."""
    times = {model: summary[f"step_milliseconds_{model}"] for model in MODELS}
    shown = ", ".join(f"{MODELS[model]} {ms:.0f} ms" for model, ms in times.items() if ms is not None)
    if None in times.values() or summary.get("peak_gib") is None:  # of one model, or on a CPU
        return shown
    ratio = times["bf16"] / times["fp8"]
    gain = f"FP8 has {ratio:.2f} times the speed of BF16"
    return f"{shown}: {gain}" if times["fp8"] < LITTLE * times["bf16"] else f"{shown} (layers this small gain little)"


LITTLE = 0.95
"""Time of a step in FP8 relative to BF16 from which its gain is called little."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
