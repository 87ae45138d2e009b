"""Shapes that do not pay: layers too small for FP8 to be faster, and sides that kernels have to pad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.conversion.gain import predicted_gain
from octavo.doctor.check import Finding, check, ok, skipped, warning
from octavo.doctor.subjects import Trial, fp8_layers
from octavo.nn import Conv1d, Conv2d, Linear
from octavo.nn.hooks import hooked
from octavo.recipes import Recipe

Layer = Linear | Conv1d | Conv2d


@check(
    "shapes",
    symptom="a small model, or a small batch, is slower in FP8",
    remedy="Leave such layers in BF16 (--min-gain 1, Policy(min_gain=1.0)), or give a step more tokens.",
    needs=fp8_layers,
)
def shapes(trial: Trial) -> Finding:
    """Predict the gain of every FP8 layer on an H200, for the tokens that it sees in a step."""
    return judge(_rows(trial), on_gpu=trial.device.type == "cuda")


def judge(rows: list[dict[str, Any]], *, on_gpu: bool) -> Finding:
    """Return the finding for layers, each `layer`, `shape`, `tokens`, `gain`, `pads`; on a CPU none pays."""
    lost, padded = [r for r in rows if r["gain"] < 1], [r for r in rows if r["pads"]]
    least = min(rows, key=lambda row: row["gain"])
    seen = f"{len(lost)} of {len(rows)} layers lose, {least['layer']} most: predicted gain {least['gain']:.2f}"
    if not on_gpu:
        return skipped(f"on a CPU no shape pays; on an H200 {seen}" if lost else "on a CPU no shape pays")
    if lost:
        return warning(seen, rows=rows, lost=len(lost), gain=least["gain"])
    if padded:
        remedy = f"Make features and tokens multiples of {padded[0]['pads']}."
        return warning(f"{len(padded)} of {len(rows)} layers are padded in every product", remedy=remedy, rows=rows)
    return ok(f"{len(rows)} layers gain, {least['layer']} least: predicted {least['gain']:.2f}", gain=least["gain"])


def _rows(trial: Trial) -> list[dict[str, Any]]:
    """Return one row a layer that ran."""
    tokens: dict[str, int] = {}

    def count(name: str, layer: Layer) -> Callable[..., None]:
        def hook(module: object, inputs: object, y: Tensor) -> None:
            tokens[name] = y.numel() // layer.weight.shape[0]

        return hook

    hooks = (layer.register_forward_hook(count(name, layer)) for name, layer in trial.layers.items())
    with hooked(hooks), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trial.loss()
    return [_row(name, trial.layers[name], seen) for name, seen in tokens.items()]


def _row(name: str, layer: Layer, tokens: int) -> dict[str, Any]:
    out, features = layer.weight.shape[0], math.prod(layer.weight.shape[1:])
    taps = 0 if isinstance(layer, Linear) else math.prod(layer.kernel_size)
    gain = predicted_gain(layer.recipe, out, features, tokens, taps)
    multiple = _multiple(layer.recipe)
    pads = multiple if any(size % multiple for size in (out, features, tokens)) else 0
    return {"layer": name, "shape": f"{out} x {features}", "tokens": tokens, "gain": round(gain, 3), "pads": pads}


def _multiple(recipe: Recipe) -> int:
    """Return what the sides of a product are padded to."""
    tiled = any(not {a.granularity, b.granularity} <= {"tensor", "row", "column"} for _, a, b in recipe.gemms())
    return 128 if tiled else 16
