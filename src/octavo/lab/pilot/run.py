"""Run of a pilot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.conversion import Plan
from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.runtime.devices import GPUS, rates_named
from octavo.lab.models.factory import count_parameters
from octavo.lab.pilot import predicting
from octavo.lab.pilot.judging import Pilot
from octavo.lab.pilot.measuring import PRECISIONS, Conditions, Measurement, count_flops, measure
from octavo.lab.train import device as devices
from octavo.lab.train.subject import Subject, first_tensor
from octavo.recipes import DEFAULT, FALLBACK, load, names

RECIPES = (DEFAULT, FALLBACK, "tensorwise", "block")
"""Recipes of a pilot by default: the default, and in FP8 alone with scales per row, per tensor and per block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of a pilot."""

    recipes: tuple[str, ...] = RECIPES
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """bf16 always; fp16 and fp32 beside it, the latter on a GPU alone."""
    steps: int = 20
    lr: float = 3e-4
    compile: bool = False
    device: str = "auto"
    gpu: str = "h200"
    """GPU to predict for on a CPU, h100 or h200."""


def run_pilot(subject: Subject, settings: Settings, report: Callable[[str], None] = lambda doing: None) -> Pilot:
    """Train a new model for a few steps in every precision, and return the results.

    On a CPU, losses and errors are measured, which are those of a GPU; times and memory are predicted.

    Args:
        report: called with a description of each measurement before it starts.

    Raises:
        ConfigError: an unknown recipe, precision, device or GPU, or a batch without a tensor.
    """
    _check(settings)
    device = devices.use(settings.device)
    is_gpu = device.type == "cuda"
    if is_gpu and not settings.steps:
        raise ConfigError("--steps 0: predicts, on a CPU alone. On a GPU give it a few steps.")
    report("counting FLOPs")
    flops = count_flops(subject)
    compiled = settings.compile and is_gpu
    how = Conditions(
        subject=subject, device=device, steps=settings.steps, lr=settings.lr, compile=compiled, flops=flops
    )
    precisions = dict.fromkeys(("bf16", *settings.precisions))
    if not is_gpu:
        precisions.pop("fp32", None)  # its time is what speaks against it, and a CPU has none to compare
    model = subject.build() if settings.steps else subject.build_without_values()
    found = {name: Measurement(precision=name) for name in (*precisions, *settings.recipes)}
    plans: dict[str, Plan | None] = {}
    for name in found if settings.steps else ():
        report(f"training in {name}")
        found[name], plans[name] = measure(name, model, how)
    report("plans")
    predicted = {name: predicting.plan_for(name, how, settings.gpu) for name in settings.recipes}
    if not is_gpu:
        _predict(found, predicted, how, report)
    capacity = torch.cuda.get_device_properties(device).total_memory / 2**30 if is_gpu else 0.0
    return Pilot(
        workload=subject.name,
        unit=subject.unit,
        tokens=subject.tokens,
        samples=len(first_tensor(next(subject.batches()))),
        data=subject.data,
        device=devices.describe(device),
        predicted_for="" if is_gpu else settings.gpu,
        capacity_gib=capacity or predicting.CAPACITY_GIB[settings.gpu],
        parameters=count_parameters(model),
        rows=how.rows,
        elsewhere=flops.elsewhere / flops.total if flops and flops.total else None,
        compiled=how.compile,
        rates=rates_named(torch.cuda.get_device_name(device)) if is_gpu else GPUS[settings.gpu].rates,
        measured=found,
        plans={name: (plans.get(name) if is_gpu else None) or plan for name, plan in predicted.items()},
    )


def _predict(
    found: dict[str, Measurement],
    plans: dict[str, Plan],
    how: Conditions,
    report: Callable[[str], None],
) -> None:
    """Replace times by predicted ones, and add the memory of BF16 and of the fastest recipe, if the model is traced."""
    for name in found:
        plan = plans.get(name) or next(iter(plans.values()))
        predicting.predict(found[name], plan, how)
    if how.flops is None:
        return
    fastest = min(plans, key=lambda name: found[name].step_ms or 0.0)
    for name in ("bf16", *([fastest] if plans[fastest].fp8_layers else [])):
        report(f"memory in {name}")
        found[name].peak_gib = predicting.peak_gib(name, how)


def _check(settings: Settings) -> None:
    for name in settings.precisions:
        if name not in PRECISIONS:
            raise ConfigError(
                f"--precisions: '{name}' is not one of {', '.join(PRECISIONS)}.{did_you_mean(name, PRECISIONS)}"
            )
    if settings.gpu not in predicting.CAPACITY_GIB:
        raise ConfigError(f"--gpu: '{settings.gpu}' is not one of {', '.join(predicting.CAPACITY_GIB)}.")
    if not settings.recipes:
        raise ConfigError(f"--recipes: name at least one of {', '.join(names())}.")
    for name in settings.recipes:
        if not load(name).is_fp8:
            raise ConfigError(f"--recipes: '{name}' has nothing in FP8.")
