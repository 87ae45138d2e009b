"""What tensor parallel ranks send each other of activations, as steps of autograd.

With sequence parallel (arXiv 2205.05198, section 4.2.2) each rank has T / n of the tokens between the layers that are
cut, and all tokens inside of them:

    gather_codes    (B, t, K) on each rank -> codes (B T, K) and scales of all     backward: sum, scattered by tokens
    gather_values   (B, t, K) -> (B, T, K)                                         backward: sum, scattered by tokens
    scatter_sum     (B, T, N), a part of a sum -> (B, t, N), the sum               backward: all tokens gathered

Without it every rank has all tokens everywhere: `copy_in` and `sum_out` (arXiv 1909.08053, section 3).

B: batch, T: tokens, t: tokens of a rank, K and N: features. Ranks hold tokens in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as functional

from octavo.errors import UnsupportedError
from octavo.kernels import Target
from octavo.kernels.target import laid_out
from octavo.nn.functional import compute_dtype
from octavo.nn.handoff import offer, stand_in, taken
from octavo.nn.weight_codes import quantize_matrix
from octavo.numerics import Quantized, dequantize

Move = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""(tensor of this rank, the ranks) -> what this rank has of the result."""


def gather_codes(x: Tensor, target: Target, group: dist.ProcessGroup) -> Tensor:
    """Return what stands for the tokens of all ranks (B, T, K) to layers that read them as `target`.

    Only codes and scales are sent and kept: they are pinned to the result (`octavo.nn.handoff`), whose own values are
    NaN in no memory, for nobody to read. In compiled code nothing can be pinned: there it holds the values of the
    codes, and layers quantise them again, to the same values.

    Args:
        x: (B, t, K); codes that a norm has pinned to it are taken.
    """
    ready = taken(x, target)
    dtype = compute_dtype(x)
    codes, scale = (None, None) if ready is None else (ready.codes, ready.scale)
    y, all_codes, all_scales = _GatherCodes.apply(x, codes, scale, target, group, dtype)  # type: ignore[no-untyped-call]
    if not torch.compiler.is_compiling():
        offer(y, laid_out(Quantized(all_codes, all_scales, target.tile)), target)
    result: Tensor = y
    return result


def gather_values(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks (B, T, K) in the dtype that layers compute in, from those of each (B, t, K)."""
    result: Tensor = _Moved.apply(x.to(compute_dtype(x)), group, _gather, _sum_and_scatter)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens (B, t, N) of the sum over the ranks of x (B, T, N).

    Raises:
        UnsupportedError: the ranks do not divide T.
    """
    result: Tensor = _Moved.apply(x, group, _sum_and_scatter, _gather)  # type: ignore[no-untyped-call]
    return result


def copy_in(x: Tensor, target: Target | None, group: dist.ProcessGroup) -> Tensor:
    """Return x, whose gradient is the sum over the ranks, in the dtype that layers compute in.

    Codes of `target` that are pinned to x are pinned to the result.
    """
    ready = None if target is None else taken(x, target)
    y: Tensor = _CopyIn.apply(x, group, compute_dtype(x))  # type: ignore[no-untyped-call]
    if ready is not None and target is not None:
        offer(y, ready, target)
    return y


def sum_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of x, whose gradient all ranks have."""
    result: Tensor = _Moved.apply(x, group, summed, _as_it_is)  # type: ignore[no-untyped-call]
    return result


def own_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens (B, t, ...) of x (B, T, ...): a view.

    Raises:
        UnsupportedError: the ranks do not divide T.
    """
    _check_tokens(x, group.size())
    return x.chunk(group.size(), dim=1)[dist.get_rank(group)]


def all_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, which compute the same of them: the gradient of each rank's own is its own."""
    result: Tensor = _Moved.apply(x, group, _gather, own_tokens)  # type: ignore[no-untyped-call]
    return result


def mean_of_tokens(loss: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over the tokens of all ranks from the mean over each rank's own.

    Args:
        loss: of any shape.
        counts: how many tokens each of its elements is a mean of.
    """
    total = counts.to(loss.dtype)
    own = total.clone()
    dist.all_reduce(total, group=group)
    return sum_out(loss * (own / total), group)


class _GatherCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, codes, scale, target, group, dtype = arguments
        rows = math.prod(x.shape[:-1])
        made = Quantized(codes, scale, target.tile)
        if codes is None:
            made = quantize_matrix(x.reshape(rows, x.shape[-1]), target)
        shape = x.shape[:-1]
        all_codes = _gather(made.codes.view(torch.uint8).reshape(*shape, -1), group).view(made.codes.dtype)
        all_scales = _gather(made.scale.contiguous().reshape(*shape, -1), group)
        ctx.group, ctx.x_dtype = group, x.dtype
        all_codes, all_scales = all_codes.flatten(0, 1), all_scales.flatten(0, 1)
        wide = (x.shape[0], x.shape[1] * group.size(), x.shape[2])
        if torch.compiler.is_compiling():
            y = dequantize(Quantized(all_codes, all_scales, target.tile)).to(dtype).view(wide)
        else:
            y = stand_in(wide, dtype, x.device)
        ctx.mark_non_differentiable(all_codes, all_scales)
        ctx.set_materialize_grads(False)
        return y, all_codes, all_scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dx = None if grads[0] is None else _sum_and_scatter(grads[0], ctx.group).to(ctx.x_dtype)
        return dx, *(None,) * 5


class _Moved(torch.autograd.Function):
    """What one function makes of x; the gradient is what another makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return summed(grads[0].to(ctx.dtype), ctx.group).to(grads[0].dtype), None, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of x, in memory of its own."""
    if torch.compiler.is_compiling():  # here and below: PyTorch 2.11 loses the gradient of what is received in place
        return cast(Tensor, functional.all_reduce(x, "sum", group))
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _as_it_is(x: Tensor, _: dist.ProcessGroup) -> Tensor:
    return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (B, T, ...) of all ranks from x (B, t, ...) of each."""
    parts: Tensor = _of_all(x.contiguous(), group).unflatten(0, (group.size(), -1))
    if x.shape[0] == 1:  # the ranks' tokens lie one after another already
        return parts.view(1, -1, *x.shape[2:])
    return parts.transpose(0, 1).flatten(1, 2)


def _of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x, 0, group)
    received = torch.empty(group.size() * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(received, x, group=group)
    return received


def _sum_and_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's (B, t, ...) of the sum over the ranks of x (B, T, ...)."""
    ranks = group.size()
    _check_tokens(x, ranks)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    if torch.compiler.is_compiling():
        return cast(Tensor, functional.reduce_scatter_tensor(parts, "sum", 0, group))
    own = torch.empty(parts.shape[0] // ranks, *parts.shape[1:], dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(own, parts, group=group)
    return own


def _check_tokens(x: Tensor, ranks: int) -> None:
    if x.dim() < 2 or x.shape[1] % ranks:
        raise UnsupportedError(
            f"sequence parallel: {tuple(x.shape)} is no batch of sequences that {ranks} ranks can share: the second "
            f"dimension, the tokens, must be a multiple of {ranks}. Choose such a length, or sequence=False."
        )
