"""One operand of fprop rounded, everything else in BF16: which share of a recipe's gap has the weight, which the input?

No hardware multiplies INT8 by BF16, so the product is emulated: the operand is quantised by the specification
(`octavo.numerics`), decoded, rotated back, and multiplied in BF16. Both gradients are those of unrounded operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.conversion import Plan
from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec
from octavo.numerics import block_for, dequantize, quantize, rotate
from octavo.recipes.operands import spec_of


class RoundedLinear(nn.Linear):
    """A linear layer with one operand of fprop rounded to a target; in BF16 while `enabled` is False."""

    role: str
    """`input` or `weight`."""
    target: QuantSpec
    enabled: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b for x (..., K)."""
        if not self.enabled:
            return F.linear(input, self.weight, self.bias)
        if self.role == "input":
            return F.linear(rounded(input, self.target), self.weight, self.bias)
        return F.linear(input, rounded(self.weight, self.target), self.bias)


def rounded(x: Tensor, target: QuantSpec) -> Tensor:
    """Return x (..., K) rounded to a target, FP32; its gradient is passed on unchanged."""
    rows = x.detach().reshape(-1, x.shape[-1])
    values = dequantize(quantize(rows, target.fmt, target.tile, target.scaling, rotation=target.rotation))
    if target.rotation:
        values = rotate(values, block_for(x.shape[-1], target.rotation))  # its own inverse
    return values.view_as(x) + (x - x.detach())


def emulate(model: nn.Module, plan: Plan, role: str) -> None:
    """Round one operand of fprop, `input` or `weight`, in the linear layers of a plan, in place.

    Raises:
        UnsupportedError: the plan has a layer that is not linear, such as experts.
    """
    for row in plan.layers:
        if not row.is_fp8:
            continue
        layer = model.get_submodule(row.module)
        if type(layer) is not nn.Linear:
            raise UnsupportedError(f"emulate.only: {row.name} is no nn.Linear, whose operands alone are emulated.")
        layer.__class__ = RoundedLinear
        recipe = plan.recipes[row.name]
        layer.role, layer.target, layer.enabled = role, spec_of(getattr(recipe.fprop, role)), True  # type: ignore[assignment]


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Compute in BF16 inside the block."""
    layers = [layer for layer in model.modules() if isinstance(layer, RoundedLinear)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True
