"""Serving mismatch: are the codes that would be served those that the model was trained with, bit for bit?

Every list of weights that a forward multiplies is caught together with what it is quantised to. The codes that fprop
reads, which are kept from step to step, are compared with those that the specification (`octavo.numerics`) makes of
the weights as they are now. FP8 weights are served as they lie. Beside that it is counted how many codes would differ
if a server quantised the weights, saved in BF16, by itself: that is what exporting codes avoids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.doctor.check import Finding, check, failure, ok, skipped
from octavo.doctor.subjects import Trial, fp8_layers
from octavo.kernels import Target
from octavo.kernels.target import target_of
from octavo.nn.own_codes import has_codes, joined
from octavo.nn.weights import as_matrix, quantized_weights
from octavo.numerics import Quantized
from octavo.numerics import quantize as specified
from octavo.tensor import FP8Tensor


@check(
    "serving",
    symptom="the served model answers otherwise than the trained one",
    remedy="A weight was written behind Octavo's back (weight.data): call octavo.nn.weights_changed() after that.",
    needs=fp8_layers,
)
def serving(trial: Trial) -> Finding:
    """Compare the codes and scales that fprop reads with those that would be served."""
    names = {id(p): name for name, p in trial.model.named_parameters()}
    with _Products() as products, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trial.loss()
    rows = [_row([names.get(id(w), "?") for w in weights], weights, target) for weights, target in products.found]
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


class _Products(TorchDispatchMode):
    """Catches the weights of every product, and what each is quantised to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[list[Tensor], Target]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.octavo.fprop.default:
            target = target_of(args[4])
            assert target is not None
            self.found.append((list(args[3]), target))
        return function(*args, **(kwargs or {}))


def _row(names: list[str], weights: list[Tensor], target: Target) -> dict[str, Any] | None:
    is_mixed = has_codes(weights) and not all(isinstance(weight, FP8Tensor) for weight in weights)
    if target.rounding != "nearest" or is_mixed or any(weight.dim() != 2 for weight in weights):
        return None
    read = quantized_weights(weights, target)  # what fprop has just read: nothing is made anew
    served, from_bf16 = (_served(weights, target, dtype) for dtype in (None, torch.bfloat16))
    return {
        "weights": names[0].removesuffix(".weight") + (f" (+{len(names) - 1})" if len(names) > 1 else ""),
        "codes": read.codes.numel(),
        "differ": _count(read.codes, served.codes),
        "scales_differ": _count(read.scale, served.scale),
        "differ_from_bf16": _count(read.codes, from_bf16.codes),
    }


def _served(weights: list[Tensor], target: Target, dtype: torch.dtype | None) -> Quantized:
    """Return what is served: the codes of FP8 weights, else those of the stack, its values rounded to `dtype` first."""
    own = [weight.quantized for weight in weights if isinstance(weight, FP8Tensor)]
    if own:
        return joined(own)
    stack = torch.cat([as_matrix(weight.detach()) for weight in weights])
    stack = stack if dtype is None else stack.to(dtype)
    return specified(stack, target.fmt, target.tile, target.scaling)


def _count(one: Tensor, other: Tensor) -> int:
    """Return how many elements differ in a bit; all where the shapes do."""
    if one.shape != other.shape:
        return max(one.numel(), other.numel())
    as_bits = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
    return int((one.contiguous().view(as_bits) != other.contiguous().view(as_bits)).sum())
