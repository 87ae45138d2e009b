"""Throughput, utilisation, energy and memory of a run, from its store."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.models import ModelConfig, flops_per_token
from octavo.models.flops import datasheet_tflops
from octavo.monitor.store import RunReader, Series
from octavo.monitor.store.reader import JOULES_PER_KWH
from octavo.monitor.store.series import Values

MODELS = ("fp8", "bf16")


def speed(run: RunReader, *, points: int = 1500) -> tuple[dict[str, Values], dict[str, Any]]:
    """Return series to draw, each `name/x` and `name/y`, and facts.

    Series over steps, with MODEL `fp8` or `bf16`: `tokens_per_second_MODEL`, `tflops_MODEL`, and
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
    found: dict[str, Values] = {}
    for model in MODELS:
        series = run.scalar(f"milliseconds_{model}", points=points)
        if len(series):
            _add_model(found, facts, model, series, per_token, per_step, peaks)
    if "milliseconds_fp8" in facts and "milliseconds_bf16" in facts:
        facts["speedup"] = facts["milliseconds_bf16"] / facts["milliseconds_fp8"]
    overall = run.scalar("tokens_per_second", points=points)
    if len(overall):
        _put(found, "tokens_per_second", *overall.points())
        facts["tokens_per_second"] = _typical(overall)
    machine = _machine(run, points)
    found |= machine
    facts |= _energy(run, per_step)
    facts |= _memory(run, machine)
    return found, facts


def _add_model(
    found: dict[str, Values],
    facts: dict[str, Any],
    model: str,
    series: Series,
    per_token: float | None,
    per_step: float | None,
    peaks: Mapping[str, float],
) -> None:
    """Add the series and facts derived from one model's step time."""
    steps, milliseconds = series.points()
    _put(found, f"milliseconds_{model}", steps, milliseconds)
    typical = facts[f"milliseconds_{model}"] = _typical(series)
    derived = {f"tokens_per_second_{model}": 1e3 * per_step} if per_step else {}
    if per_step and per_token:
        tera = per_token * per_step * 1e-9  # FLOPs per step; divided by milliseconds, TFLOP/s
        derived |= {f"tflops_{model}": tera}
        derived |= {f"utilisation_{model}_of_{name}": 100 * tera / peak for name, peak in peaks.items()}
    for name, work in derived.items():
        _put(found, name, steps, work / milliseconds)
        facts[name] = work / typical


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


def _typical(series: Series) -> float:
    """Return the median without the first tenth, which includes compilation and warm-up."""
    middle = (series.low + series.high)[len(series) // 10 :] / 2
    return float(np.nanmedian(middle)) if np.isfinite(middle).any() else math.nan


def _machine(run: RunReader, points: int) -> dict[str, Values]:
    rows = run.system()
    clock = run.scalar("time", points=points)
    times = np.array([row["t"] for row in rows])
    if len(clock) > 1:
        steps = np.interp(times, clock.low, clock.first.astype(np.float64))
    else:
        steps = times - times[:1].sum() if len(times) else times
    found: dict[str, Values] = {}
    for key in sorted({key for row in rows for key in row} - {"t"}):
        values = np.array([row.get(key, math.nan) for row in rows], dtype=np.float64)
        places = np.arange(len(values))
        index, kept = Series(places, places, values, values).drawn(points).points()
        _put(found, key, steps[index], kept)
    return found


def _energy(run: RunReader, per_step: float | None) -> dict[str, float]:
    """Return joules per step and token, and tokens per kWh, since the last session; kWh and cost of all of them.

    One GPU of the first rank is measured: the kWh of all are its kWh by the ranks.
    """
    rows = [row for row in run.system() if "gpu_energy_joules" in row]
    clock = run.scalar("time", points=2000)
    if len(rows) < 2 or len(clock) < 2:
        return {}
    energies = np.array([row["gpu_energy_joules"] for row in rows])
    start = int(np.flatnonzero(np.diff(energies) < 0)[-1]) + 1 if (np.diff(energies) < 0).any() else 0
    steps = np.interp([row["t"] for row in rows], clock.low, clock.first.astype(np.float64))
    joules, made = float(energies[-1] - energies[start]), float(steps[-1] - steps[start])
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


def _memory(run: RunReader, machine: Mapping[str, Values]) -> dict[str, Any]:
    """Return the newest memory in bytes by kind, and the forecast of the peak if the summary has one."""
    memory = {key.removesuffix("/y"): values for key, values in machine.items() if key.endswith("bytes/y")}
    known = {key: float(values[-1]) for key, values in memory.items() if values.size}
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


def _put(found: dict[str, Values], name: str, x: NDArray[Any], y: NDArray[Any]) -> None:
    found[f"{name}/x"], found[f"{name}/y"] = x.astype(np.float64), y.astype(np.float64)
