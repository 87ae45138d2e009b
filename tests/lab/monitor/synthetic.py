"""Synthetic runs of any size, for tests of readers, exports and the dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.lab.monitor.store import schema
from octavo.lab.monitor.store.schema import TensorRow
from octavo.lab.monitor.store.writer import RunWriter

_LINEARS = {"wq": "attention", "wk": "attention", "wv": "attention", "wo": "attention", "w1": "mlp", "w3": "mlp",
            "w2": "mlp"}  # fmt: skip
_COMMIT = 256
_OPERANDS = dict.fromkeys(("input", "weight", "grad_output"), "e4m3 per-row") | {"grad_weight": ""}


def synthetic_run(
    path: str | Path,
    *,
    layers: int = 21,
    steps: int = 400,
    telemetry_every: int = 1,
    spike_at: int | None = None,
    baseline: bool = True,
    finished: bool = True,
    recipe: str = "folded",
    start: float = 1.7e9,
    seed: int = 0,
) -> RunWriter:
    """Write a run of `layers` linear layers, 7 a block, and return its writer: closed if `finished`, else open.

    The loss falls, deeper layers flush more, and at step `spike_at` (two thirds of the way by default; 0 for none)
    the middle layer's grad_output saturates, the loss jumps and an event says so. Everything follows from `seed`; a
    step takes a tenth of a second from `start` (seconds since 1970). Written 256 steps a commit, so that 20,000 steps
    of 200 layers take seconds. An open writer is for the test to go on with.
    """
    random = np.random.default_rng(seed)
    spike = 2 * steps // 3 if spike_at is None else spike_at
    names = list(_names(layers))
    rows = [TensorRow(name, role, _OPERANDS[role], (512, 512)) for name in names for role in schema.ROLES]
    run = RunWriter(path, overwrite=True)
    with run.batch():
        _documents(run, names, steps, baseline, recipe, seed)
        run.set_tensors(rows)
    base, noise = _base(len(names)), random.standard_normal((64, len(rows), len(schema.STATS))).astype(np.float32)
    hot = rows.index(TensorRow(names[len(names) // 2], "grad_output", "e4m3 per-row", (512, 512)))
    for begin in range(1, steps + 1, _COMMIT):
        with run.batch():
            for step in range(begin, min(begin + _COMMIT, steps + 1)):
                snapshot = None
                if step % telemetry_every == 0 or step == spike:
                    snapshot = base * (1 + 0.05 * noise[step % 64])
                    if step == spike:
                        snapshot[hot, schema.STATS.index("saturated")] = 0.25
                now = start + 0.1 * step
                run.write_step(step, _scalars(step, steps, spike, baseline, random, now), snapshot, t=now)
                _happenings(run, step, spike, rows[hot], now)
    with run.batch():
        bells = [_bell(row.role) for row in rows[: len(schema.ROLES) * min(len(names), 50)]]
        run.write_histograms(steps, -20, bells + [[0] * len(bells[0])] * (len(rows) - len(bells)))
        if finished:
            run.write_document("summary", {"steps": steps, "heldout_loss_fp8": 2.02, "heldout_loss_bf16": 2.0,
                                           "gap_percent": 1.0, "tokens_per_second": 50_000.0}, step=steps)  # fmt: skip
    if finished:
        run.close()
    return run


def _names(layers: int) -> Iterator[str]:
    for index in range(layers):
        linear = list(_LINEARS)[index % 7]
        yield f"layers.{index // 7}.{_LINEARS[linear]}.{linear}"


def _base(layers: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the statistics that the run has on average, (4 layers, statistics): gradients are small and flush more."""
    depth = np.repeat(np.linspace(0, 1, layers), 4)
    size = np.tile([4.0, 0.5, 1e-3, 1e-4], layers) * (1 + depth)
    flushed = np.tile([1e-3, 1e-4, 1e-2, np.nan], layers) * (0.1 + depth)
    quantised = np.tile([1.0, 1.0, 1.0, np.nan], layers)
    columns = {"amax": size, "scale": quantised * size / 448, "flushed": flushed, "subnormal": 3 * flushed,
               "saturated": 0 * quantised, "nonfinite": np.zeros_like(size), "mean": 0.01 * size,
               "variance": 0.05 * size**2, "kurtosis": 3 + 5 * depth, "sqnr": quantised * (32 - 4 * depth)}  # fmt: skip
    return np.stack([columns[name] for name in schema.STATS], axis=1).astype(np.float32)


def _scalars(
    step: int, steps: int, spike: int, baseline: bool, random: np.random.Generator, now: float
) -> dict[str, float]:
    noise, wiggle = random.standard_normal(2)
    bf16 = 2.0 + 3.5 * math.exp(-4 * step / steps) + 0.02 * noise
    fp8 = bf16 * 1.002 + 0.005 * wiggle + (3.0 if step == spike else 0.0)
    values = {"loss_fp8": fp8, "gradient_norm_fp8": 1 + 0.1 * abs(noise), "milliseconds_fp8": 40 + wiggle}
    if baseline:
        values |= {"loss_bf16": bf16, "gradient_norm_bf16": 1 + 0.1 * abs(noise), "milliseconds_bf16": 60 + wiggle,
                   "gap_percent": 100 * (fp8 - bf16) / bf16}  # fmt: skip
    lr = 1e-3 * min(step / (0.07 * steps), 0.55 + 0.45 * math.cos(math.pi * step / steps))
    return {**values, "lr": lr, "tokens": 4096.0 * step, "tokens_per_second": 41_000 + 500 * noise, "time": now}


def _happenings(run: RunWriter, step: int, spike: int, hot: TensorRow, now: float) -> None:
    if step % 50 == 0:
        gib = 2.0**30
        run.write_system({"gpu_power_watts": 610 + step % 70, "gpu_energy_joules": 61.0 * step,
                          "gpu_utilisation": 0.97, "gpu_memory_bytes": 71 * gib, "gpu_temperature": 61.0,
                          "torch_allocated_bytes": 40 * gib, "process_memory_bytes": 3 * gib}, t=now)  # fmt: skip
    if step == spike:
        run.write_event(step, "saturation", f"{hot.layer}: a quarter of grad_output saturated", level="warning",
                        layer=hot.layer, role=hot.role, value=0.25, limit=0.001, action="scale window raised",
                        t=now)  # fmt: skip


def _documents(run: RunWriter, names: list[str], steps: int, baseline: bool, recipe: str, seed: int) -> None:
    model = {"architecture": "llama", "vocab": 32000, "dim": 512, "layers": -(-len(names) // 7), "heads": 8}
    loop = {"steps": steps, "batch": 16, "recipe": recipe, "baseline": baseline, "seed": seed, "log_every": 1}
    run.write_document("config", {"model": model, "data": {"source": "synthetic", "sequence": 256},
                                  "optimizer": {"name": "adamw", "lr": 1e-3}, "run": loop})  # fmt: skip
    layers = [
        {"name": name, "kind": "linear", "shape": [512, 512], "recipe": recipe, "precision": "fp8 / fp8 / fp8",
         "kernels": "cublas / cublas / cublas", "gain": 1.4, "reason": "", "keeps_input": False,
         "weight": "unchanged", "saves": 0}
        for name in names
    ]  # fmt: skip
    layers[0]["evidence"] = {
        "reason": "within the loss budget", "loss_change": 2e-5, "loss_error": 3e-6,
        "turned": {"fprop": 1e-4, "dgrad": 5e-5}, "ms_saved": 0.03, "ms_offered": 0.05,
    }  # fmt: skip
    head = {**layers[0], "name": "lm_head", "precision": "bf16 / bf16 / bf16", "gain": None, "reason": "a head",
            "evidence": None}  # fmt: skip
    plan = {"recipe": recipe, "device": "cuda", "tokens": 4096, "structures": [], "unapplied": []}
    run.write_document("plan", {**plan, "layers": [*layers, head]})
    run.write_document("env", {"device": "a synthetic GPU", "lanes": ["fp8", "bf16"] if baseline else ["fp8"],
                               "parameters": 262144 * len(names), "versions": {"octavo": "synthetic"}})  # fmt: skip
    run.write_document("corpus", {"source": "synthetic", "documents": 1000, "train_tokens": 1_000_000,
                                  "unigram_entropy": 5.1})  # fmt: skip


def _bell(role: str) -> list[int]:
    """Return counts of 32 binades from 2^-20 on."""
    centre = {"input": 24, "weight": 21, "grad_output": 13, "grad_weight": 5}[role]
    return [round(262144 * math.exp(-((bin - centre) ** 2) / 8) / 5) for bin in range(32)]
