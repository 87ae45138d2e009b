"""Serving mismatch: are the codes that would be served those that the model was trained with, bit for bit?

The codes that fprop reads are compared with those that the specification (`octavo.numerics`) makes of the weights. FP8
weights are served as they lie. The check also counts how many codes would differ if a server quantised the weights,
saved in BF16, by itself: exporting codes avoids that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.doctor.check import Finding, check, failure, ok, skipped
from octavo.doctor.subjects import Trial, fp8_layers
from octavo.kernels import Target
from octavo.nn import Linear
from octavo.nn.fp8_weights import has_fp8_weight
from octavo.nn.functional import target_of
from octavo.nn.together import groups_of
from octavo.nn.weight_codes import as_matrix, join_rows, quantize_weights
from octavo.numerics import Quantized
from octavo.numerics import quantize as specified
from octavo.tensor import FP8Tensor, local


@check(
    "serving",
    symptom="the served model answers otherwise than the trained one",
    remedy="A weight was written while its codes were reused: end the octavo.nn.reuse_weight_codes block before that.",
    needs=fp8_layers,
)
def serving(trial: Trial) -> Finding:
    """Compare the codes and scales that fprop reads with those that would be served."""
    names = {id(module): name for name, module in trial.model.named_modules()}
    layers = [module for module in trial.model.modules() if isinstance(module, Linear) and module.recipe.fprop.is_fp8]
    with torch.no_grad():
        rows = [_row(names[id(group[0])], group) for group in groups_of(trial.model, layers)]
    return judge([row for row in rows if row is not None])


def judge(rows: list[dict[str, Any]]) -> Finding:
    """Return the finding for stacks of weights: `weights`, `codes`, `differ`, `scales_differ`, `differ_from_bf16`."""
    if not rows:
        return skipped("no product of the forward reads a weight in FP8")
    wrong = [row for row in rows if row["differ"] or row["scales_differ"]]
    codes = sum(row["codes"] for row in rows)
    if wrong:
        differ, first = sum(row["differ"] for row in wrong), wrong[0]
        seen = f"{differ:,} codes and {sum(r['scales_differ'] for r in wrong):,} scales are not those of the weights, "
        return failure(f"{seen}first in {first['weights']}", rows=rows, codes=codes, differ=differ)
    share = sum(row["differ_from_bf16"] for row in rows) / codes
    seen = f"{codes:,} codes are those of the weights; {100 * share:.2g} % would not be, if made of BF16 copies"
    return ok(seen, rows=rows, codes=codes, differ=0, share_from_bf16=share)


def _row(name: str, group: list[Linear]) -> dict[str, Any] | None:
    weights, target = [local(layer.weight) for layer in group], target_of(group[0].recipe.fprop.weight)
    is_mixed = has_fp8_weight(weights) and not all(isinstance(weight, FP8Tensor) for weight in weights)
    if target.rounding != "nearest" or is_mixed:
        return None
    read = (group[0].attached_codes or quantize_weights(weights, target)).stack
    served, from_bf16 = (_served(weights, target, dtype) for dtype in (None, torch.bfloat16))
    return {
        "weights": name + (f" (+{len(group) - 1})" if len(group) > 1 else ""),
        "codes": read.codes.numel(),
        "differ": _count(read.codes, served.codes),
        "scales_differ": _count(read.scale, served.scale),
        "differ_from_bf16": _count(read.codes, from_bf16.codes),
    }


def _served(weights: list[Tensor], target: Target, dtype: torch.dtype | None) -> Quantized:
    """Return what is served: the codes of FP8 weights, else those of the stack, its values rounded to `dtype` first."""
    own = [weight.quantized for weight in weights if isinstance(weight, FP8Tensor)]
    if own:
        return join_rows(own)
    stack = torch.cat([as_matrix(weight.detach()) for weight in weights])
    stack = stack if dtype is None else stack.to(dtype)
    return specified(stack, target.fmt, target.tile, target.scaling)


def _count(one: Tensor, other: Tensor) -> int:
    """Return how many elements differ in a bit; all where the shapes do."""
    if one.shape != other.shape:
        return max(one.numel(), other.numel())
    as_bits = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
    return int((one.contiguous().view(as_bits) != other.contiguous().view(as_bits)).sum())
