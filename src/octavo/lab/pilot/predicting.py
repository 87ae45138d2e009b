"""Predicted times and memory of a GPU that is not available.

A step takes the time of its kernels, or that in which the host launches them, whichever is longer.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.conversion import Plan, convert, make_plan
from octavo.conversion.gain import predicted_ms
from octavo.errors import ConfigError
from octavo.kernels.runtime.devices import GPUS, H200, Rates
from octavo.lab import memory
from octavo.lab.pilot.measuring import PRECISIONS, Conditions, Measurement
from octavo.lab.train.subject import NO_VALUES, Subject
from octavo.recipes import load

CAPACITY_GIB = {"h100": 79.1, "h200": 139.8}
"""Memory available to PyTorch."""
_OTHER_TFLOPS = 350.0
"""Rate of attention and other products outside linear layers, on Hopper, forward and backward."""
_REST = 0.12
"""Share that element-wise kernels take beside the products in BF16 on an H200; elsewhere by the rate of a copy."""

_LAUNCH_MS = 0.03
"""Time of the host per operator in eager mode, and more of it per layer in FP8: 2.1 ms for the 66 launches of a Llama
block in BF16, and 4.2 with its seven linear layers in FP8 (`octavo bench host`)."""
_FP8_LAYER_MS = 0.3


def plan_for(recipe: str, how: Conditions, gpu: str) -> Plan:
    """Return the plan of a recipe on a GPU, with the predicted gain of each layer."""
    return make_plan(how.subject.build_without_values(), recipe, tokens=how.rows, device=gpu)


def products_ms(plan: Plan, rows: int, rates: Rates, *, in_bf16: bool = False) -> float:
    """Return the predicted milliseconds of all linear layers of a step, forward and backward, quantisation included."""
    bf16 = load("bf16")
    chosen = {} if in_bf16 else plan.recipes
    linears = (layer for layer in plan.layers if layer.kind == "linear")
    return sum(predicted_ms(chosen.get(layer.name, bf16), *layer.shape, rows, rates=rates) for layer in linears)


def launch_ms(launches: int, plan: Plan | None) -> float:
    """Return the predicted milliseconds that a host takes to launch an eager step, in BF16 or with a plan's layers."""
    return _LAUNCH_MS * launches + (0.0 if plan is None else _FP8_LAYER_MS * plan.fp8_layers)


def predict(found: Measurement, plan: Plan, how: Conditions) -> None:
    """Replace the times in a measurement, which are those of a CPU, by predicted ones; without FLOPs they are unknown.

    Args:
        plan: of the recipe; of any recipe for BF16 and FP16.
    """
    found.step_ms = found.tokens_per_s = found.tflops = None
    found.phases, found.parts = {}, {}
    if how.flops is None:
        return
    is_fp8 = found.precision not in PRECISIONS
    other = 1e3 * how.flops.elsewhere / (_OTHER_TFLOPS * 1e12)
    rates = GPUS[plan.device].rates
    assert rates is not None  # those of `CAPACITY_GIB` have rates
    base = products_ms(plan, how.rows, rates, in_bf16=True)
    products = products_ms(plan, how.rows, rates) if is_fp8 else base
    rest = _REST * H200.copy / rates.copy * (base + other)
    busy, launching = products + other + rest, launch_ms(how.flops.launches, plan if is_fp8 else None)
    found.step_ms = max(busy, launching)
    found.phases = {"idle": found.step_ms - busy}
    found.parts = {"gemm": products, "attention": other, "elementwise": rest}
    found.tokens_per_s = 1e3 * how.subject.tokens / found.step_ms
    found.tflops = how.flops.total / found.step_ms / 1e9


def peak_gib(precision: str, how: Conditions) -> float | None:
    """Return the predicted peak of a step by autocast with AdamW; None where the model cannot be traced."""

    def program() -> memory.Program:
        model = _uninitialised(how.subject)
        if precision != "bf16":
            convert(model, precision, tokens=how.rows)
        optimizer = torch.optim.AdamW(model.parameters(), how.lr)
        batch = next(how.subject.batches())

        def forward_backward() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = how.subject.loss(model, batch)
            loss.backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return memory.Program(models=[model], forward_backward=forward_backward, update=update)

    try:
        return memory.forecast(program).peak / 2**30
    except (*NO_VALUES, ConfigError):
        return None  # a model that reads values has none while it is traced


def _uninitialised(subject: Subject) -> nn.Module:
    """Build a model without initialising it, which takes minutes while every operation is recorded."""
    with torch.device("meta"):
        model = subject.build()
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in tensors:  # a tied one stays tied
            empty = torch.zeros_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, made.setdefault(id(tensor), nn.Parameter(empty) if is_parameter else empty))
    return model
