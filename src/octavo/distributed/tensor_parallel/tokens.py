"""Collectives on activations between tensor-parallel ranks, as autograd functions.

With sequence parallel (arXiv 2205.05198, section 4.2.2) each rank has T / n of the tokens between the sharded layers,
and all tokens inside of them:

    all_gather_codes        (B, t, K) per rank -> codes (B T, K), scales of all   backward: reduce-scatter
    all_gather_values       (B, t, K) -> (B, T, K)                                backward: reduce-scatter
    reduce_scatter_tokens   (B, T, N), a partial sum -> (B, t, N), the sum        backward: all-gather, of codes too

Without it every rank has all tokens everywhere: `copy_to_region`, `reduce_from_region` (arXiv 1909.08053, section 3).

B: batch, T: tokens, t: tokens of a rank, K and N: features. Tokens are distributed in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from octavo._util.autograd import first_order
from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec, quantize_matrix
from octavo.kernels.quant_spec import laid_out
from octavo.nn.attached_codes import attach_codes, attached_codes, pass_on, placeholder
from octavo.nn.cross_entropy import weighted
from octavo.nn.functional import compute_dtype
from octavo.numerics import Quantized, dequantize

Move = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""(tensor of this rank, ranks) -> this rank's result."""


def all_gather_codes(x: Tensor, target: QuantSpec, group: dist.ProcessGroup) -> Tensor:
    """Return a placeholder of the tokens of all ranks (B, T, K), for layers that read their codes as `target`.

    Only codes and scales are sent and saved. They are attached to the result (`octavo.nn.attached_codes`), whose own
    values are NaN without memory. In compiled code nothing can be attached: there the result holds the dequantised
    codes, which layers quantise again, to the same values.

    Args:
            x: (B, t, K); codes that a norm has attached to it are used.
    """
    ready = attached_codes(x, target)
    dtype = compute_dtype(x)
    codes, scale = (None, None) if ready is None else (ready.codes, ready.scale)
    y, all_codes, all_scales = _GatherCodes.apply(x, codes, scale, target, group, dtype)  # type: ignore[no-untyped-call]
    if not torch.compiler.is_compiling():
        attach_codes(y, (laid_out(Quantized(all_codes, all_scales, target.tile)), target))
    result: Tensor = y
    return result


def all_gather_values(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks (B, T, K), in the layers' compute dtype, from those of each (B, t, K)."""
    return _collective(x.to(compute_dtype(x)), group, _all_gather, _reduce_scatter)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup, *, codes: bool = False) -> Tensor:
    """Return this rank's tokens (B, t, N) of the sum over the ranks of x (B, T, N), a partial sum.

    Args:
        codes: gather its gradient as E4M3 codes with a power-of-two scale per token, one byte per value. Layers whose
            recipe rounds it to such codes lose nothing: rounding again is exact, but for values that a folded scale
            moves below the format's smallest normal.

    Raises:
        UnsupportedError: the ranks do not divide T.
    """
    return _collective(x, group, _reduce_scatter, _all_gather_rounded if codes else _all_gather)


def copy_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x; its gradient is summed over the ranks, in the layers' compute dtype.

    Codes that are attached to x are attached to the result too.
    """
    dtype = compute_dtype(x)

    def total(dy: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce_sum(dy.to(dtype), group).to(dy.dtype)

    y = _collective(x, group, lambda x, _: x.view_as(x), total)
    pass_on(x, y)
    return y


def reduce_from_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks; its gradient is the same on all ranks."""
    return _collective(x, group, all_reduce_sum, lambda grad, _: grad)


def local_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens (B, t, ...) of x (B, T, ...): a view.

    Raises:
        UnsupportedError: the ranks do not divide T.
    """
    _check_tokens(x, group.size())
    return x.chunk(group.size(), dim=1)[dist.get_rank(group)]


def all_gather_replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, for replicated computation: a rank's gradient is that of its own tokens."""
    return _collective(x, group, _all_gather, local_tokens)


def mean_of_tokens(loss: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over the tokens of all ranks, from the means over each rank's tokens.

    Args:
        loss: any shape; not read where this rank has no tokens: their mean is NaN.
        counts: number of tokens behind each element of `loss`, or of its first dimensions.
    """
    own = counts.to(loss.dtype).view(counts.shape + (1,) * (loss.dim() - counts.dim()))
    return reduce_from_region(weighted(loss, own / all_reduce_sum(own, group)), group)


class _GatherCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, codes, scale, target, group, dtype = arguments
        made = Quantized(codes, scale, target.tile)
        if codes is None:
            made = quantize_matrix(x.reshape(-1, x.shape[-1]), target)
        all_codes, all_scales, _ = _all_gather_quantized(made, x.shape[:-1], group)
        ctx.group, ctx.x_dtype = group, x.dtype
        wide = (x.shape[0], x.shape[1] * group.size(), x.shape[2])
        if torch.compiler.is_compiling():
            y = dequantize(Quantized(all_codes, all_scales, target.tile)).to(dtype).view(wide)
        else:
            y = placeholder(wide, dtype, x.device)
        ctx.mark_non_differentiable(all_codes, all_scales)
        ctx.set_materialize_grads(False)
        return y, all_codes, all_scales

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dx = None if grads[0] is None else _reduce_scatter(grads[0], ctx.group).to(ctx.x_dtype)
        return dx, *(None,) * 5


class _Collective(torch.autograd.Function):
    """Applies one collective in forward and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Move, backward: Move) -> Tensor:
        ctx.group, ctx.backward_move = group, backward
        return forward(x, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_move(grads[0], ctx.group), None, None, None


def _collective(x: Tensor, group: dist.ProcessGroup, forward: Move, backward: Move) -> Tensor:
    result: Tensor = _Collective.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
    return result


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks, in new memory."""
    if torch.compiler.is_compiling():  # here and below: PyTorch 2.11 loses gradients of in-place collectives
        return cast(Tensor, functional.all_reduce(x, "sum", group))
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_reduce_sums(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the sums of tensors over the ranks, in new memory. Vectors of one dtype are sent as one."""
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        vectors = [i for i, x in enumerate(tensors) if x.dim() == 1 and x.dtype == dtype]
        if len(vectors) > 1:
            whole = all_reduce_sum(torch.cat([tensors[i] for i in vectors]), group)
            sums.update(zip(vectors, whole.split([len(tensors[i]) for i in vectors]), strict=True))
    return [sums[i] if i in sums else all_reduce_sum(x, group) for i, x in enumerate(tensors)]


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (B, T, ...) of all ranks from x (B, t, ...) of each."""
    return _all_gathers([x], group)[0]


def _all_gathers(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return (B, T, ...) of all ranks for each tensor (B, t, ...), by one collective."""
    tensors = [x.contiguous() for x in tensors]
    if torch.compiler.is_compiling():
        received = functional.all_gather_into_tensor_coalesced(tensors, group)
    else:
        received = [x.new_empty(group.size() * x.shape[0], *x.shape[1:]) for x in tensors]
        if len(tensors) == 1:
            dist.all_gather_into_tensor(received[0], tensors[0], group=group)
        else:
            group.allgather_into_tensor_coalesced(received, tensors).wait()
    return [_in_order(all_of_them, x, group.size()) for all_of_them, x in zip(received, tensors, strict=True)]


def _in_order(received: Tensor, x: Tensor, ranks: int) -> Tensor:
    """Return (B, T, ...) from the tokens (ranks B, t, ...) of one rank after another."""
    parts: Tensor = received.unflatten(0, (ranks, -1))
    if x.shape[0] == 1:  # the tokens are contiguous already
        return parts.view(1, -1, *x.shape[2:])
    return parts.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's (B, t, ...) of the sum over the ranks of x (B, T, ...)."""
    ranks = group.size()
    _check_tokens(x, ranks)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    if torch.compiler.is_compiling():
        return cast(Tensor, functional.reduce_scatter_tensor(parts, "sum", 0, group))
    own = torch.empty(parts.shape[0] // ranks, *parts.shape[1:], dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(own, parts, group=group)
    return own


_GRADIENT = QuantSpec("e4m3", "row", "power_of_two")


def _all_gather_rounded(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (B, T, N) of all ranks from x (B, t, N) of each, sent as codes and scales; in the dtype of x."""
    made = quantize_matrix(x.reshape(-1, x.shape[-1]), _GRADIENT)
    values = dequantize(_all_gather_quantized(made, x.shape[:-1], group), x.dtype)
    return values.view(x.shape[0], -1, x.shape[-1])


def _all_gather_quantized(made: Quantized, shape: Sequence[int], group: dist.ProcessGroup) -> Quantized:
    """Return codes (B T, N) and scales of all ranks from those of (B, t) tokens of each, by one collective."""
    # As bytes: gloo takes tensors of one collective to have one dtype. As vectors first: the compiler gives a column of
    # scales any stride between its single elements, and PyTorch then has no view of it as bytes.
    sent = [part.contiguous().flatten().view(torch.uint8).view(*shape, -1) for part in (made.codes, made.scale)]
    codes, scale = (gathered.flatten(0, 1) for gathered in _all_gathers(sent, group))
    return Quantized(codes.view(made.codes.dtype), scale.view(made.scale.dtype), made.granularity)


def _check_tokens(x: Tensor, ranks: int) -> None:
    if x.dim() < 2 or x.shape[1] % ranks:
        raise UnsupportedError(
            f"sequence parallel: {tuple(x.shape)} is not a batch of sequences that {ranks} ranks can share: the second "
            f"dimension, the tokens, must be a multiple of {ranks}. Take such a length, or sequence=False."
        )
