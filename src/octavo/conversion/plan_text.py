"""A plan as text: its table, the footer, and notes on what a user may not expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from octavo._util.terminal import columns, quantity
from octavo.conversion.choices import advice
from octavo.conversion.fusion_patterns import FusionPattern
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.policy import TOO_SMALL
from octavo.conversion.refusals import device_unsupported_reason
from octavo.kernels.dispatch import architecture, on_gpu, rates
from octavo.nn.modules import full_name
from octavo.nn.operands import dtype_note

if TYPE_CHECKING:
    from octavo.conversion.plan import Plan


def table(plan: Plan) -> list[str]:
    """Return the lines of `print(plan)`."""
    return [*columns(table_rows(plan)), "", *footer(plan)]


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the titles and the rows of a plan's table; the gain column is left out if no gain is predicted."""
    rows = [("layer", "N x K", "recipe", "fprop / dgrad / wgrad", "gain", "why"), *_alike(plan.layers)]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for weight in plan.unconverted:
        key = _pattern(weight.name), " x ".join(map(str, weight.shape)), weight.reason
        groups.setdefault(key, []).append(weight.name)
    rows += [(_counted(key[0], names), key[1], "-", "not converted", "-", key[2]) for key, names in groups.items()]
    has_gain = any(layer.gain for layer in plan.layers)
    return rows if has_gain else [(*row[:4], row[5]) for row in rows]


def footer(plan: Plan) -> list[str]:
    """Return the lines below a plan's table: counts, gains, weights in FP8, fusions, options without effect, advice."""
    weights = sum(layer.weights for layer in plan.layers)
    layers = "layers" if any("conv" in layer.kind for layer in plan.layers) else "linear layers"
    share = f"{_percent(plan.fp8_weights / max(weights, 1))} of their weights"
    if plan.unconverted:
        share += f", {_percent(plan.share)} of the FLOPs of products with weights"
    share += f", {_percent(plan.fp8_weights / max(plan.parameters, 1))} of all parameters"
    slow = sum("reference" in layer.kernels for layer in plan.layers) if plan.device != "cpu" else 0
    slowly = f", {slow} of them by the slow reference" if slow else ""
    return [
        f"{plan.fp8_layers} of {len(plan.layers)} {layers} in FP8 ({share}) on {plan.device}{slowly}",
        *_gains(plan),
        *_stored(plan),
        *_together(plan.structures),
        *plan.unapplied,
        *plan.notes,
        *advice(plan),
    ]


def _percent(share: float) -> str:
    """Format a share; 100% only if it is everything."""
    return f"{share if share >= 1 else min(share, 0.99):.0%}"


def _gains(plan: Plan) -> list[str]:
    """Return a line on the column of gains, if there is one."""
    said = f"gain: predicted speed relative to BF16, with {plan.tokens:,} tokens per forward"
    return [said] if any(layer.gain for layer in plan.layers) else []


def _stored(plan: Plan) -> list[str]:
    """Return a line on the weights that are stored in FP8, if there are any."""
    count = sum(layer.weight == "fp8" for layer in plan.layers)
    saves = f"{plan.saved_bytes / 2**20:,.1f} MiB less than now" if plan.saved_bytes else "as they are now"
    return [f"weights of {quantity(count, 'layer')} stored in FP8, {saves}"] if count else []


def _together(structures: tuple[FusionPattern, ...]) -> list[str]:
    """Return a line per kind of pattern; those that differ only by the numbers in their names are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for structure in structures:
        groups.setdefault((_pattern(structure.name), structure.what), []).append(structure.name)
    names = {key: _counted(key[0], found) or "the model itself" for key, found in groups.items()}
    return [f"{names[key]}: {key[1]}" for key in groups]


def _pattern(name: str) -> str:
    """Return a name with stars in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern} ({len(names)})"


def _alike(layers: tuple[LayerPlan, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table; layers that differ only by the numbers in their names share one, with a count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        kind = "" if layer.kind == "linear" else f", {layer.kind}"
        shape, gain = "{} x {}{}".format(*layer.shape, kind), f"{layer.gain:.2f}" if layer.gain else "-"
        kernels = layer.kernels.split(" / ")
        precision = (f"3 x {kernels[0]}" if len({*kernels}) == 1 else layer.kernels) if layer.is_fp8 else "bf16"
        key = (_pattern(layer.name), shape, layer.recipe, precision, gain, layer.reason)
        groups.setdefault(key, []).append(layer.name)
    return [(_counted(key[0], names), *key[1:]) for key, names in groups.items()]


def commonest_reason(layers: tuple[LayerPlan, ...]) -> str:
    """Return the most common reason of layers that stay in BF16, with their number."""
    given = (TOO_SMALL if layer.reason.startswith(TOO_SMALL) else layer.reason for layer in layers if not layer.is_fp8)
    reasons = Counter(given).most_common(1)  # each layer that is too small has its own gain
    alike = [f"{reason} ({count} of {quantity(len(layers), 'layer')})" for reason, count in reasons]
    return "".join(alike) or "the model has no linear layer and no convolution"


FAST_PATH = (
    "nn.TransformerEncoderLayer computes linear1 and linear2 itself, in high precision, in model.eval() without "
    "gradients and without autocast: torch.backends.mha.set_fastpath_enabled(False) keeps such an evaluation in FP8"
)
"""A note that `convert` logs as a warning too."""


def notes_on(plan: Plan, model: nn.Module, dtypes: set[torch.dtype]) -> Iterator[str]:
    """Yield what a user may not expect. dtypes: those of the weights of FP8 layers."""
    if torch.backends.mha.get_fastpath_enabled() and any(_has_fast_path(m, n, plan) for n, m in model.named_modules()):
        yield FAST_PATH
    rows, recipe, device = plan.layers, plan.recipe, torch.device(plan.device)
    if plan.is_little and dtypes:
        largest = max(plan.unconverted, key=lambda weight: weight.multiplied)
        yield (
            f"Little will run in FP8: {plan.share:.0%} of the FLOPs of products with weights. The largest weight that "
            f"no layer reads is {largest.name}: {largest.reason}"
        )
    if reason := device_unsupported_reason(device):
        yield f"{architecture(device).name}: {reason}. `octavo.convert` refuses it unless allow_reference=True"
    elif on_gpu(device) and dtypes:
        known = rates(device)
        if known is None:
            yield "No gain is predicted: Octavo has no rates of this GPU. `octavo bench step` measures"
        elif known.derived:
            yield f"Gains are predicted from {known.derived}"
    if not dtypes and (recipe.is_fp8 or recipe.modules):
        yield f"Nothing will run in FP8: {commonest_reason(rows)}"
    if torch.is_autocast_enabled(device.type):
        return
    for dtype in (torch.float16, torch.float32):
        if dtype in dtypes and (note := dtype_note(dtype, device.type)) is not None:
            yield f"Weights are {dtype}. Without autocast {note}"


def _has_fast_path(module: nn.Module, name: str, plan: Plan) -> bool:
    """Return whether a module reads the weights of its FP8 layers in evaluation instead of calling the layers."""
    if type(module).forward is not nn.TransformerEncoderLayer.forward:
        return False
    attention = module.self_attn
    is_eligible = isinstance(attention, nn.MultiheadAttention) and attention.batch_first
    is_eligible = is_eligible and bool(module.activation_relu_or_gelu)
    return is_eligible and any(full_name(name, child) in plan.recipes for child in ("linear1", "linear2"))
