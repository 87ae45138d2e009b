"""Rotary position embedding with its gradient: one kernel each, in eager and in compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo._util.autograd import first_order
from octavo.kernels import rotary


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, T, H, E) with each head's channel pairs rotated by the token's position, contiguous, in x's dtype.

    Arguments and errors are those of `octavo.kernels.rotary.rotate`. The tables get no gradient.
    """
    y: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        return rotary.rotate(x, cos, sin)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_outputs[0] is None:
            return None, None, None
        cos, sin = ctx.saved_tensors
        return rotary.rotate(grad_outputs[0], cos, sin, conjugate=True), None, None
