"""Memory of a run: predicted and measured peak, and the largest model that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo import recipes
from octavo._util.terminal import Report, quantity, silent
from octavo.conversion import enable
from octavo.kernels.runtime.ledger import hold_warnings, warn_once
from octavo.lab import memory
from octavo.lab.memory.forecast import largest
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.config import RunConfig
from octavo.lab.train.setup import convert_as, make_states


def forecast_run(config: RunConfig, *, gpus: int = 1, report: Report = silent) -> memory.Forecast:
    """Return the predicted peak memory of a run on a GPU, per GPU with FSDP2 over several.

    The batch is that of one GPU. Blocks are compiled unless the configuration disables it. If the schedule
    changes the precision, the forecast is that of the steps that need most. `report` is called before each part.

    Raises:
        ConfigError: unknown recipe, or fewer than one GPU.
    """
    planned = config.with_run(compile="off" if config.run.compile == "off" else "on", graph="off")
    phases = _phases(planned)

    def forecast(number: int) -> memory.Forecast:
        return memory.forecast(
            partial(_program, planned, phases[number]),
            gpus=gpus,
            gathers_codes=not config.run.leaves_recipe,
            reshard=config.parallel.reshard,
            report=lambda doing, done: report(doing, (number + done) / len(phases)),
        )

    return max(map(forecast, range(len(phases))), key=lambda found: found.peak)


def largest_model(
    config: RunConfig, gib: float, *, gpus: int = 1, report: Report = silent
) -> tuple[ModelConfig, memory.Forecast] | None:
    """Return the largest model of these proportions whose run needs at most `gib` GiB, or None.

    `report` is called for each model that is tried, as by `forecast_run`; their number is not known in advance. The
    warnings of the others are not logged.

    Raises:
        ConfigError: as `forecast_run`.
    """
    warnings: dict[ModelConfig, list[str]] = {}

    def forecast(model: ModelConfig) -> memory.Forecast:
        size = f"{quantity(model.layers, 'layer')} of {model.dim}"
        tried = replace(config, model=model)
        with hold_warnings() as warnings[model]:
            return forecast_run(tried, gpus=gpus, report=lambda doing, done: report(f"{size}, {doing}", done))

    found = largest_of(config.model, forecast, gib)
    for message in warnings[found[0]] if found else ():
        warn_once(message)
    return found


def largest_of(
    model: ModelConfig, forecast: Callable[[ModelConfig], memory.Forecast], gib: float
) -> tuple[ModelConfig, memory.Forecast] | None:
    """Return the largest model of the proportions of `model` that fits into `gib` GiB, and its forecast, or None."""
    found: dict[int, memory.Forecast] = {}

    def peak_of(groups: int) -> int:
        found[groups] = forecast(scaled(model, groups))
        return found[groups].peak

    groups = largest(peak_of, int(gib * 2**30), start=model.key_value_heads)
    return (scaled(model, groups), found[groups]) if groups else None


def scaled(model: ModelConfig, groups: int) -> ModelConfig:
    """Return `model` scaled to `groups` key and value heads, as Llama 1B relates to 8B.

    The head size and the query heads per key stay the same; width, feed-forward size and depth scale along.
    """
    ratio = groups / model.key_value_heads
    heads = model.heads // model.key_value_heads * groups
    ffn, layers = max(round(model.ffn_dim * ratio / 128), 1) * 128, max(round(model.layers * ratio), 1)
    return replace(model, dim=heads * model.head_dim, heads=heads, kv_heads=groups, ffn=ffn, layers=layers)


def peaks(config: RunConfig, device: torch.device, *, ranks: int = 1) -> dict[str, Any]:
    """Return the measured and the predicted peak in GiB for the summary; None for both without a GPU.

    The prediction is also split by kind, for the dashboard. If the forecast fails, `memory_forecast_error` says why, so
    that the summary is still written. On several ranks the peak is that of rank 0, and there is no prediction.
    """
    if device.type != "cuda":
        return {"peak_gib": None, "predicted_peak_gib": None}
    peak = round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    if ranks > 1:
        return {"peak_gib": peak, "predicted_peak_gib": None}
    try:
        forecast = forecast_run(config)
    except Exception as error:  # a forecast traces the program and may raise anything
        failure = f"{type(error).__name__}: {error}"
        return {"peak_gib": peak, "predicted_peak_gib": None, "memory_forecast_error": failure}
    by_kind = {kind: round(size / 2**30, 3) for kind, size in forecast.by_kind.items()}
    predicted = round(forecast.peak / 2**30, 3)
    return {"peak_gib": peak, "predicted_peak_gib": predicted, "predicted_gib_by_kind": by_kind}


def _phases(config: RunConfig) -> list[Callable[[nn.Module], object]]:
    """Return a function per phase of the schedule that sets the precision of the FP8 model."""
    run = config.run
    phases: list[Callable[[nn.Module], object]] = [lambda model: None]
    if run.bf16_first_steps:
        phases.append(lambda model: enable(model, False))
    if run.last_share:
        phases.append(lambda model: convert_as(config, model, recipes.load(run.last_recipe)))
    return phases


def _program(config: RunConfig, phase: Callable[[nn.Module], object]) -> memory.Program:
    config = config.with_run(start_from="")  # values do not matter
    states, plan = make_states(config, torch.device("cpu"))
    if plan is not None:
        phase(states[0].model)
    shape = config.run.batch, config.data.sequence
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)

    def step() -> None:
        for state in states:
            state.step(tokens, targets, step=1, lr=config.optimizer.lr, accumulate=config.run.accumulate)

    return memory.Program(models=[state.model for state in states], forward_backward=step)
