"""Checks of a model's numbers: NaN and infinities, FP8 against high precision, fast sums, the codes to be served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo import kernels, observed
from octavo._util.terminal import and_more, quantity
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import spec_of
from octavo.lab.doctor.check import Finding, Verdict, check, failure, ok, skipped
from octavo.lab.doctor.subjects import Trial, a_gpu, fp8_layers
from octavo.lab.guard.alarms import percent_above
from octavo.lab.monitor.gap import GAP_LIMIT, HARMFUL_GAP
from octavo.nn.fp8_weights import values
from octavo.nn.fused import fusion_groups
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import full_name
from octavo.nn.weight_codes import as_matrix, has_fp8_weight, join_rows, quantize_weights
from octavo.numerics import Quantized, cosine_of, inner_products
from octavo.numerics import quantize as specified
from octavo.recipes import GEMMS
from octavo.tensor import FP8Tensor, local

NONFINITE_REMEDIES = {
    "input": "Check what computes it, between this layer and the previous ones: a norm, attention, the data.",
    "weight": "The previous step wrote it. Check the optimizer and its gradient; load a good checkpoint.",
    "grad_output": "Check what follows the layer, up to the loss: a division, a logarithm, a loss scale.",
}
"""Remedy, by the first non-finite role."""
OUTSIDE = "It arises outside the FP8 layers, in the loss or before it: it remains under octavo.disabled(model)."


@check(
    "nan",
    symptom="the loss is NaN or infinite",
    remedy="Check what computes the value named, where it first appears; resume from a good checkpoint.",
)
def nonfinite(trial: Trial) -> Finding:
    """Check every parameter, every GEMM operand of one forward and backward, the loss and the gradients."""
    parameters = ((name, values(p.detach(), p.dtype)) for name, p in trial.model.named_parameters())
    if bad := [(name, count) for name, x in parameters if (count := int((~x.isfinite()).sum()))]:
        rows = [{"parameter": name, "values": count} for name, count in bad]
        seen = f"{bad[0][0]} contains {quantity(bad[0][1], 'non-finite value')}{and_more(bad)}"
        return failure(seen, remedy=NONFINITE_REMEDIES["weight"], rows=rows)
    trial.model.zero_grad(set_to_none=True)
    with observed(trial.model) if trial.layers else nullcontext() as report:
        loss = trial.loss()
        loss.backward()
    gradients = [
        name for name, p in trial.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
    ]
    trial.model.zero_grad(set_to_none=True)
    faults = report.faults() if report is not None else []
    if faults:
        layer, role, count = faults[0]
        seen = f"{role} of {layer} was the first non-finite tensor: {quantity(count, 'value')}{and_more(faults)}"
        return failure(seen, remedy=NONFINITE_REMEDIES[role], rows=[fault._asdict() for fault in faults])
    value = float(loss.detach())
    if not math.isfinite(value):
        return failure(f"the loss is {value}, but every operand of the FP8 layers is finite", remedy=OUTSIDE)
    if gradients:
        rows = [{"gradient": name} for name in gradients]
        return failure(f"the gradient of {gradients[0]} is not finite{and_more(gradients)}", rows=rows)
    return ok(f"loss {value:.4f}; parameters, operands and gradients are finite", loss=value)


COSINE = 0.9
"""Lowest usual cosine between a layer's gradients in FP8 and in high precision."""


@check(
    "drift",
    symptom="the loss in FP8 stays above the loss in BF16",
    remedy="Keep the named layer, or its block, in BF16: octavo localize finds which. If scales are per tensor, use a"
    " finer recipe (folded). For a gap of tenths of a percent that all layers share, try rowwise_bf16_fprop.",
    needs=fp8_layers,
    read=lambda trial: (*trial.in_both(trial.loss_value), _cosines(trial)),
)
def drift(read: tuple[float, float, Mapping[str, float]]) -> Finding:
    """Judge a batch's loss in FP8 and without, and its gradients' cosines."""
    fp8, high, cosines = read
    worst = min(cosines, key=lambda name: (not math.isnan(cosines[name]), cosines[name]), default="none")
    cosine = cosines.get(worst, 1.0)
    gap, verdict = _judge_gap(fp8, high)
    if verdict == Verdict.OK and not cosine >= COSINE:
        verdict = Verdict.WARNING
    seen = f"loss {fp8:.4f} in FP8, {high:.4f} by the same weights without FP8 ({gap:+z.2f} %); lowest gradient"
    seen += f" cosine {cosine:.3f} ({worst})"
    numbers = {"loss_fp8": fp8, "loss_high": high, "gap_percent": gap, "layer": worst, "cosine": cosine}
    return Finding(verdict, seen, numbers, [{"layer": name, "cosine": value} for name, value in cosines.items()])


def _judge_gap(loss: float, reference: float) -> tuple[float, Verdict]:
    """Return the excess of a loss over its reference in percent, and the verdict by the limits of the dashboard."""
    gap = percent_above(loss, reference) or 0.0
    if abs(gap) <= GAP_LIMIT:
        return gap, Verdict.OK
    return gap, Verdict.WARNING if abs(gap) <= HARMFUL_GAP else Verdict.FAILURE  # a NaN fails too


def _cosines(trial: Trial) -> dict[str, float]:
    """Return the cosine of each FP8 weight's gradients in FP8 and in high precision."""
    wanted = {full_name(name, "weight"): name for name in trial.layers}
    fp8, high = trial.in_both(lambda: trial.gradients(wanted))
    both = {wanted[name]: (fp8[name], high[name]) for name in fp8 if name in high}
    return {name: cosine_of(inner_products(*gradients)) for name, gradients in both.items()}


def _fast_layers(trial: Trial) -> int:
    """Return the number of layers whose recipe has a GEMM with fast accumulation."""
    recipes = (layer.recipe for layer in trial.layers.values())
    return sum(any(recipe.gemm(gemm).accumulate == "fast" for gemm in GEMMS) for recipe in recipes)


def _fast_accumulation(trial: Trial) -> str:
    """Requirement of a check: fast accumulation, which only GPUs have."""
    fast = _fast_layers(trial)
    if not fast:
        return "no recipe in use has fast accumulation"
    return f"fast accumulation in {quantity(fast, 'layer')}, on GPUs only" if a_gpu(trial) else ""


def _fast_and_slow(trial: Trial) -> tuple[float, float, int]:
    """Return the loss as it is and with slow accumulation, and the number of layers with fast accumulation."""
    as_is = trial.seeded(trial.loss_value)
    with kernels.gemm_by("slow"):
        return as_is, trial.seeded(trial.loss_value), _fast_layers(trial)


@check(
    "fast sums",
    symptom="a checkpoint is worse on other hardware or in BF16 than in training",
    remedy="Continue with a recipe of slow accumulation, such as 'folded'; see octavo bench portability RUN.",
    needs=_fast_accumulation,
    read=_fast_and_slow,
)
def fast_sums(read: tuple[float, float, int]) -> Finding:
    """Judge the loss with fast and with slow accumulation, of a number of layers with fast accumulation."""
    fast, slow, layers = read
    gap, verdict = _judge_gap(fast, slow)
    seen = f"loss {fast:.4f}, {slow:.4f} with slow sums ({gap:+z.2f} %); fast sums in {quantity(layers, 'layer')}"
    return Finding(verdict, seen, {"loss": fast, "loss_slow": slow, "gap_percent": gap, "layers": layers})


# Serving: the codes that fprop reads are compared bit for bit with those that the specification (`octavo.numerics`)
# makes of the weights; FP8 weights are served as stored. The check also counts the codes that would differ if a server
# quantised BF16 copies of the weights itself, which exporting codes avoids.


def _code_rows(trial: Trial) -> list[dict[str, Any]]:
    names = {id(module): name for name, module in trial.model.named_modules()}
    layers = [m for m in trial.model.modules() if isinstance(m, LinearLayer) and m.recipe.fprop.is_fp8]
    with torch.no_grad():
        rows = [_code_row(names[id(group[0])], group) for group in fusion_groups(trial.model, layers)]
    return [row for row in rows if row is not None]


@check(
    "serving",
    symptom="the served model answers differently from the trained one",
    remedy="A weight was written while its codes were reused: end the octavo.nn.reuse_weight_codes block before that.",
    needs=fp8_layers,
    read=_code_rows,
)
def serving(rows: list[dict[str, Any]]) -> Finding:
    """Compare the codes and scales that fprop reads with those to be served: a row per group of weights."""
    if not rows:
        return skipped("no GEMM of the forward reads a weight in FP8")
    wrong = [row for row in rows if row["differ"] or row["scales_differ"]]
    codes = sum(row["codes"] for row in rows)
    if wrong:
        differ, first = sum(row["differ"] for row in wrong), wrong[0]
        scales = quantity(sum(row["scales_differ"] for row in wrong), "scale")
        seen = f"{quantity(differ, 'code')} and {scales} do not match the weights, first in {first['weights']}"
        return failure(seen, rows=rows, codes=codes, differ=differ)
    share = sum(row["differ_from_bf16"] for row in rows) / codes
    seen = f"{codes:,} codes match the weights; {100 * share:.2g} % would not if made from BF16 copies"
    return ok(seen, rows=rows, codes=codes, differ=0, share_from_bf16=share)


def _code_row(name: str, group: list[LinearLayer]) -> dict[str, Any] | None:
    weights, target = [local(layer.matrix) for layer in group], spec_of(group[0].recipe.fprop.weight)
    is_mixed = has_fp8_weight(weights) and not all(isinstance(weight, FP8Tensor) for weight in weights)
    if target.rounding != "nearest" or is_mixed:
        return None
    read = (group[0].weight_codes or quantize_weights(weights, target)).stack
    served, from_bf16 = (_served(weights, target, dtype) for dtype in (None, torch.bfloat16))
    return {
        "weights": name + (f" (+{len(group) - 1})" if len(group) > 1 else ""),
        "codes": read.codes.numel(),
        "differ": _count(read.codes, served.codes),
        "scales_differ": _count(read.scale, served.scale),
        "differ_from_bf16": _count(read.codes, from_bf16.codes),
    }


def _served(weights: list[Tensor], target: QuantSpec, dtype: torch.dtype | None) -> Quantized:
    """Return the codes to be served: those stored, or else made from the group's weights, rounded to `dtype` first."""
    own = [weight.quantized for weight in weights if isinstance(weight, FP8Tensor)]
    if own:
        return join_rows(own)
    stack = torch.cat([as_matrix(weight.detach()) for weight in weights])
    stack = stack if dtype is None else stack.to(dtype)
    return specified(stack, target.fmt, target.tile, target.scaling, rotation=target.rotation)


def _count(one: Tensor, other: Tensor) -> int:
    """Count the elements that differ in any bit; all if the shapes differ."""
    if one.shape != other.shape:
        return max(one.numel(), other.numel())
    as_bits = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
    return int((one.contiguous().view(as_bits) != other.contiguous().view(as_bits)).sum())
