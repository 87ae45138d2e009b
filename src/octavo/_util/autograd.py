"""Limits of autograd Functions that compute first derivatives only: asking for more is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, function

from octavo.errors import UnsupportedError

_WAY_OUT = "Compute this part in high precision: within octavo.disabled(model), or without converting its layers."


def tracked(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as a Function is to get them: detached where no gradient is recorded.

    Its `ctx.needs_input_grad` says what requires a gradient, under `torch.no_grad` too.
    """
    return tensors if torch.is_grad_enabled() else tuple([tensor.detach() for tensor in tensors])


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a Function that cannot be differentiated again.

    PyTorch's `once_differentiable` raises where the second derivative reaches the Function; where the input has another
    path, it leaves this one out and returns a wrong number.

    Raises:
        UnsupportedError: from backward, with `create_graph=True` or batched gradients.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise UnsupportedError(f"Octavo's layers have no second derivative (create_graph=True). {_WAY_OUT}")
            refuse_transforms(*gradients)
        return checked(ctx, *gradients)

    return once


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Refuse transforms of `torch.func`, batched gradients and dual numbers, for which FP8 layers have no rule.

    Args:
        tensors: gradients that may be batched (`is_grads_batched`), outside of any transform.

    Raises:
        UnsupportedError: one is active.
    """
    if torch.compiler.is_compiling():
        return
    is_batched = False
    for each in tensors:  # a generator is a call per tensor, in each backward of a layer
        is_batched = is_batched or (each is not None and torch._C._functorch.is_legacy_batchedtensor(each))
    if is_batched or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise UnsupportedError(
            "Octavo's layers have no rule for vmap, jvp and other transforms of torch.func,"
            f" nor for dual numbers. {_WAY_OUT}"
        )
