"""Throughput, utilisation, energy and memory of a run, from its store."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, flops_per_token
from octavo.lab.models.flops import datasheet_tflops
from octavo.lab.monitor.dashboard.packing import Curve
from octavo.lab.monitor.store import RunReader, Series
from octavo.lab.monitor.store.reader import JOULES_PER_KWH

MODELS = ("fp8", "bf16")


def speed(run: RunReader, *, points: int = 1500) -> tuple[dict[str, Curve], dict[str, Any]]:
    """Return curves to draw by name, and facts.

    Curves over steps, with MODEL `fp8` or `bf16`: `milliseconds_MODEL`, `tokens_per_second_MODEL`, `tflops_MODEL`, and
    `utilisation_MODEL_of_PEAK` in percent of NVIDIA's dense peak for the GPU. System readings by step: the keys of the
    table `system`. FLOPs count the model's operations once, without recomputation, in any precision.
    """
    per_token, counted = _operations(run)
    per_step = _tokens_per_step(run)
    bf16_peak = datasheet_tflops(str(run.env.get("device", "")))
    gpus = int(run.env.get("world_size") or 1)
    peaks = {} if bf16_peak is None else {"bf16": bf16_peak * gpus, "fp8": 2 * bf16_peak * gpus}
    facts: dict[str, Any] = {
        "flops_per_token": per_token,
        "operations": counted,
        "tokens_per_step": per_step,
        "peak_tflops": peaks,
        "gpus": gpus,
    }
    curves: dict[str, Curve] = {}
    work = _work(per_step, per_token, peaks)
    for model in MODELS:
        series = run.scalar(f"milliseconds_{model}", points=points)
        if len(series):
            steps, milliseconds = curves[f"milliseconds_{model}"] = series.points()
            typical = facts[f"milliseconds_{model}"] = _typical(run, series, f"step_milliseconds_{model}")
            curves |= {name.format(model): (steps, amount / milliseconds) for name, amount in work.items()}
            facts |= {name.format(model): amount / typical for name, amount in work.items()}
    if "milliseconds_fp8" in facts and "milliseconds_bf16" in facts:
        facts["speedup"] = facts["milliseconds_bf16"] / facts["milliseconds_fp8"]
    overall = run.scalar("tokens_per_second", points=points)
    if len(overall):
        curves["tokens_per_second"] = overall.points()
        facts["tokens_per_second"] = _typical(run, overall, "tokens_per_second")
    machine = _machine(run, points)
    return curves | machine, facts | _energy(run, per_step) | _memory(run, machine)


def _work(per_step: float | None, per_token: float | None, peaks: Mapping[str, float]) -> dict[str, float]:
    """Return what to divide by the milliseconds of a step, by the name of the rate that it gives; `{}` is the model."""
    if not per_step:
        return {}
    tokens = {"tokens_per_second_{}": 1e3 * per_step}
    if not per_token:
        return tokens
    tera = per_token * per_step * 1e-9
    shares = {f"utilisation_{{}}_of_{name}": 100 * tera / peak for name, peak in peaks.items()}
    return {**tokens, "tflops_{}": tera, **shares}


def _operations(run: RunReader) -> tuple[float | None, str]:
    """Return the FLOPs of training per token, and how they are counted."""
    model, sequence = run.settings("model"), run.settings("data").get("sequence")
    if sequence:
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        try:
            config = ModelConfig(**{"sequence": sequence, **{key: model[key] for key in model.keys() & known}})
            return float(flops_per_token(config, int(sequence))), "6 N + 6 L D T (PaLM, appendix B)"
        except (ConfigError, TypeError, ValueError):
            pass  # another program's configuration, with the same keys
    parameters = run.env.get("parameters")
    if parameters:
        return 6.0 * float(parameters), "6 times the parameters, without attention"
    return None, "neither the model nor its parameters are recorded"


def _tokens_per_step(run: RunReader) -> float | None:
    batch, sequence = run.settings("run").get("batch"), run.settings("data").get("sequence")
    if batch and sequence:
        return float(batch) * float(sequence)
    series = run.scalar("tokens", first=run.last_step - 200)
    if len(series) < 2:
        return None
    return float((series.high[-1] - series.high[0]) / (series.last[-1] - series.last[0]))


def _typical(run: RunReader, series: Series, of_summary: str) -> float:
    """Return what the summary says, or of a run without one the median of what is like the rest of the run.

    That is without the first tenth, which includes compilation and warm-up, and without the steps before FP8 begins.
    """
    if (told := run.summary.get(of_summary)) is not None:
        return float(told)
    in_bf16 = int((series.last <= int(run.settings("run").get("bf16_first_steps") or 0)).sum())
    start = max(len(series) // 10, in_bf16 if in_bf16 < len(series) else 0)
    middle = (series.low + series.high)[start:] / 2
    return float(np.nanmedian(middle)) if np.isfinite(middle).any() else math.nan


def _machine(run: RunReader, points: int) -> dict[str, Curve]:
    """Return the system readings by step; by seconds where the times of steps are unknown."""
    rows = run.system()
    clock = run.scalar("time", points=points)
    times = np.array([row["t"] for row in rows])
    if len(clock) > 1:
        steps = np.interp(times, clock.low, clock.first.astype(np.float64))
    else:
        steps = times - times[:1].sum() if len(times) else times
    found: dict[str, Curve] = {}
    for key in sorted({key for row in rows for key in row} - {"t"}):
        values = np.array([row.get(key, math.nan) for row in rows], dtype=np.float64)
        places = np.arange(len(values))
        index, kept = Series(places, places, values, values).drawn(points).points()
        found[key] = steps[index], kept
    return found


def _energy(run: RunReader, per_step: float | None) -> dict[str, float]:
    """Return joules per step and token, and tokens per kWh, since the last session; kWh and cost of all of them.

    One GPU of the first rank is measured: the kWh of all are its kWh by the ranks.
    """
    sessions, clock = run.energy(), run.scalar("time", points=2000)
    if not sessions or len(clock) < 2:
        return {}
    (first, least), (last, most) = sessions[-1][0], sessions[-1][-1]
    begin, end = np.interp([first, last], clock.low, clock.first.astype(np.float64))
    joules, made = most - least, float(end - begin)
    if made <= 0 or joules <= 0:
        return {}
    kwh = (run.energy_kwh() or 0.0) * int(run.env.get("world_size") or 1)
    facts = {"kwh": kwh, "joules_per_step": joules / made}
    if price := run.settings("run").get("price_per_kwh"):
        facts["cost"] = kwh * float(price)
    if per_step:
        facts |= {
            "joules_per_token": joules / made / per_step,
            "tokens_per_kwh": JOULES_PER_KWH * made * per_step / joules,
        }
    return facts


def _memory(run: RunReader, machine: Mapping[str, Curve]) -> dict[str, Any]:
    """Return the newest memory in bytes by kind, and the forecast of the peak if the summary has one."""
    known = {key: float(values[-1]) for key, (_, values) in machine.items() if key.endswith("bytes")}
    kinds: dict[str, float] = {}
    if "torch_allocated_bytes" in known:
        kinds["tensors"] = known["torch_allocated_bytes"]
    if "torch_reserved_bytes" in known:
        kinds["reserved by PyTorch, free"] = max(known["torch_reserved_bytes"] - kinds.get("tensors", 0), 0)
    if "gpu_memory_bytes" in known:
        kinds["other on the GPU"] = max(known["gpu_memory_bytes"] - sum(kinds.values()), 0)
    if "process_memory_bytes" in known:
        kinds["host memory of the process"] = known["process_memory_bytes"]
    return {"memory_bytes": kinds, "predicted_gib": run.summary.get("predicted_gib_by_kind") or {}}
