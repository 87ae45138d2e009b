"""Context parallelism: ranks that share the tokens of each sequence, so that one is longer than a rank's memory.

    octavo.convert(model)
    context = context_parallel(model, mesh)
    ...                                    # the optimizer, and sharding over these ranks too
    with context.attending(tokens):        # around forward and backward; on a CPU it does nothing
        loss = model(tokens, targets)      # each rank has all tokens, takes its own, and returns their mean loss
        loss.backward()

Everything but attention is of single tokens. Attention is computed in one of two ways:

    ring     PyTorch's (`torch.distributed.tensor.experimental.context_parallel`), on GPUs: keys and values go round
             while their neighbours are computed with, and no rank has all of them.
    gather   The reference, on any device: each rank gathers keys and values, as for Llama 3 (arXiv 2407.21783, section
             3.3.2), by PyTorch's fused kernels. Their gradients are summed over the ranks in FP32.

With N ranks a sequence is cut into 2 N chunks, of which rank r has chunk r and chunk 2 N - 1 - r: under a causal mask
the work is even.

B: batch. T: tokens of a sequence. t: tokens of a rank, T / N. c: tokens of a chunk, T / 2 N. H: query heads. G: key and
value heads. E: channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo._util.autograd import first_order
from octavo.errors import ConfigError, RunError, UnsupportedError
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.operands import autocast_dtype

Attention = Literal["auto", "ring", "gather"]


def context_parallel(model: nn.Module, mesh: DeviceMesh, *, attention: Attention = "auto") -> Context:
    """Let the ranks of a mesh share the tokens of sequences, in place; return how.

    Attention of all `octavo.nn.attention.ScaledDotProduct` is then over the tokens of all ranks. A model with an
    attribute `context`, as `octavo.lab.models.Llama`, takes its own tokens of whole sequences; to any other give
    `Context.own` of tokens, targets and positions. Gradients of parameters are those of each rank's own tokens: average
    them over these ranks, by `octavo.distributed.shard` over a mesh that has them, or by DDP.

    Args:
        model: converted or not.
        mesh: of one dimension.
        attention: `ring`, `gather`, or `auto`: `ring` on GPUs, `gather` elsewhere.

    Raises:
        ConfigError: the mesh has more dimensions, or a ring is asked for on a device for which PyTorch has none.
        UnsupportedError: the model has none of these modules, or its attention does not leave documents.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"context_parallel: the mesh has {mesh.ndim} dimensions; take one of them: mesh['context'].")
    if attention == "ring" and mesh.device_type != "cuda":
        raise ConfigError(
            f"context_parallel: attention = 'ring' is PyTorch's, which has no kernels for a {mesh.device_type.upper()}."
            " Take 'auto'."
        )
    modules = [module for module in model.modules() if isinstance(module, ScaledDotProduct)]
    if not modules:
        raise UnsupportedError(
            "context_parallel: the model has no octavo.nn.attention.ScaledDotProduct. Around a model that calls"
            " scaled_dot_product_attention itself, on GPUs, use PyTorch's own context_parallel: converted layers need"
            " nothing else."
        )
    if getattr(getattr(model, "config", None), "documents", "joined") != "joined":
        raise UnsupportedError(
            "context_parallel: attention of this model does not leave a document (model.documents = 'separate'), which"
            " a ring cannot tell. Take 'joined'."
        )
    context = Context(mesh, is_ring=attention == "ring" or (attention == "auto" and mesh.device_type == "cuda"))
    readers: list[Any] = [*modules, *([model] if hasattr(model, "context") else [])]
    for module in readers:
        module.context = context
    return context


class Context:
    """The ranks that share the tokens of sequences, seen from one of them."""

    def __init__(self, mesh: DeviceMesh, *, is_ring: bool) -> None:
        self.mesh, self.is_ring = mesh, is_ring
        self.group = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self._is_active = self._is_checked = False

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of x, along a dimension of all tokens.

        Raises:
            UnsupportedError: their number is not a multiple of twice the ranks.
        """
        if x.shape[dim] % (2 * self.ranks):
            raise UnsupportedError(
                f"context_parallel: {x.shape[dim]} tokens are not a multiple of {2 * self.ranks}, two chunks for each"
                f" of {self.ranks} ranks. Take such a length."
            )
        chunks = x.chunk(2 * self.ranks, dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim)

    @contextmanager
    def attending(self, tokens_BT: Tensor) -> Iterator[None]:
        """Send keys and values round, in forward and backward of whole sequences; without a ring, do nothing.

        Raises:
            UnsupportedError: PyTorch cuts sequences otherwise, as when its load balance was switched off.
        """
        if not self.is_ring or self._is_active:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel

        place_T1 = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[:, None]
        cut = place_T1.clone()  # PyTorch cuts sequences as it cuts this, in place
        with context_parallel(self.mesh, buffers=[cut], buffer_seq_dims=[0], no_restore_buffers={cut}):
            if not self._is_checked and not torch.equal(cut, self.own(place_T1, 0)):  # once: it waits for the device
                raise UnsupportedError(
                    "context_parallel: this version of PyTorch gives ranks other tokens than octavo does, or its load"
                    " balance was switched off. Take attention = 'gather'."
                )
            self._is_active = self._is_checked = True
            try:
                yield
            finally:
                self._is_active = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Return the attention (B, t, H, E) of this rank's q (B, t, H, E), over k and v (B, t, G, E) of all ranks.

        Raises:
            RunError: by a ring, outside of `attending`.
        """
        if (dtype := autocast_dtype(q.device.type)) is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        if not self.is_ring:
            return self._gathered(q, k, v, causal)
        if not self._is_active:
            raise RunError("context_parallel: a ring runs within `with context.attending(tokens):` only.")
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right

        grouped = q.shape[2] != k.shape[2]
        k, v = (_Gather.apply(x, self).transpose(1, 2) for x in (k, v))  # type: ignore[no-untyped-call]
        parts = []
        numbers = self.rank, 2 * self.ranks - 1 - self.rank
        for number, chunk in zip(numbers, q.transpose(1, 2).chunk(2, dim=2), strict=True):
            length = chunk.shape[2]
            seen = (number + 1) * length if causal else k.shape[2]
            mask: Any = causal_lower_right(length, seen) if causal else None  # the last query sees all of these keys
            part = F.scaled_dot_product_attention(chunk, k[:, :, :seen], v[:, :, :seen], mask, enable_gqa=grouped)
            parts.append(part)
        return torch.cat(parts, 2).transpose(1, 2)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over these ranks."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.ranks


class _Gather(torch.autograd.Function):
    """(B, T, ...) of all ranks in the order of tokens, from `Context.own` (B, t, ...) of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context, ctx.dtype = context, x.dtype
        received = x.new_empty(context.ranks * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(received, x.contiguous(), group=context.group)
        chunks = received.unflatten(0, (context.ranks, -1)).unflatten(2, (2, -1))  # (N, B, 2, c, ...)
        in_order = torch.cat([chunks[:, :, 0], chunks[:, :, 1].flip(0)])  # (2 N, B, c, ...)
        return in_order.transpose(0, 1).flatten(1, 2)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context = ctx.context
        chunks = grads[0].float().unflatten(1, (2 * context.ranks, -1)).transpose(0, 1)
        first, second = chunks.chunk(2)
        sent = torch.stack([first, second.flip(0)], dim=2).flatten(2, 3).flatten(0, 1)  # (N B, t, ...)
        own = sent.new_empty(len(sent) // context.ranks, *sent.shape[1:])
        dist.reduce_scatter_tensor(own, sent.contiguous(), group=context.group)
        return own.to(ctx.dtype), None
