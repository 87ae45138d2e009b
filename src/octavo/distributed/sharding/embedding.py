"""Sharded embedding that communicates only the rows that are looked up, instead of gathering the whole table.

    forward   each row needed by a rank, once          from the rank that owns it
    backward  row gradients, summed on this rank       to the owning rank, which sums them in FP32

A micro-batch looks up a small part of the vocabulary: 8192 tokens touch at most 6 % of 128256 rows. The rows sent, and
the gradient that each rank computes for its own tokens, are bitwise those of a full gather; rows that no rank looked up
have a zero gradient. The number of rows per rank pair is only known at run time: either the host synchronises with the
GPU once per forward pass, or the ranks exchange their requests on the host ahead of time (`send_tokens`).

U rows that this rank looks up, S rows that it sends, D dim, n ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.runtime.transfers import upload


@dataclass(frozen=True)
class RowLayout:
    """Distribution of an embedding's rows over ranks, and the dtype that they are sent in."""

    group: dist.ProcessGroup
    """Ranks that the rows are sharded over, `each` per rank; the last ranks have the remainder."""
    copies: dist.ProcessGroup | None
    """Ranks that replicate the same rows (HSDP)."""
    count: int
    """Total number of rows."""
    each: int
    """Rows per rank."""
    dtype: torch.dtype | None
    """Dtype in which rows and their gradients are sent; None: their own."""

    @property
    def first(self) -> int:
        """Index of this rank's first row."""
        return self.each * dist.get_rank(self.group)


class _Lookup(NamedTuple):
    """Rows that a batch of tokens looks up, and those to send to each rank for its own batch."""

    place: Tensor
    """Index of each token's row among the U rows; int64, shape of the tokens."""
    rows: Tensor
    """(S,) int64, relative to this rank's first row: those requested by rank 0, then by rank 1, and so on."""
    to: list[int]
    """Number of rows requested by each rank."""
    back: list[int]
    """Number of this rank's U rows that each rank owns."""

    def on(self, device: torch.device) -> _Lookup:
        """Return a copy on the device."""
        return self._replace(place=upload(self.place, device), rows=upload(self.rows, device))


class RowGatheredEmbedding(nn.Embedding):
    """`nn.Embedding` whose weight is a DTensor sharded by rows. All ranks must call it equally often."""

    layout: RowLayout
    ahead: dict[Hashable, tuple[Tensor, _Lookup]]
    """Lookups prepared by `send_tokens`. Keeping the tokens alive prevents their memory from being reused."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of rows is read on the host
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the tokens, (*input.shape, D).

        Raises:
            ConfigError: a token id is out of range; the other ranks then wait for this one.
            UnsupportedError: a CUDA graph is being captured.
        """
        if input.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "an embedding sharded by_rows sends other rows for each batch, and a CUDA graph repeats those of one."
                " Shard it as a whole, or run without a graph."
            )
        _, known = self.ahead.pop(_token_key(input), (None, None))
        lookup = known or _look_up(input, self.layout)
        weight = cast(DTensor, self.weight).to_local()
        rows = _Exchange.apply(weight, lookup, self.layout)  # type: ignore[no-untyped-call]
        return F.embedding(lookup.place, rows)


def send_tokens(tokens: Tensor, device: torch.device, *models: nn.Module, parts: int = 1) -> Tensor:
    """Copy tokens from the host to the device, and prepare row lookups so that the next forward does not synchronise.

    Without it, an embedding sharded with `by_rows` makes the host wait for the GPU in each forward pass; other models
    do not need it. All ranks must call it, with the tokens of their next forward pass.

    Args:
        tokens: (B, T), on the CPU.
        parts: number of equal parts of the batch, as `chunk` splits it, each with its own forward pass.

    Raises:
        ConfigError: a token id is out of range, or the process group has no CPU backend.
    """
    sent = upload(tokens, device)
    for model in models:
        for module in model.modules():
            if isinstance(module, RowGatheredEmbedding):
                pairs = zip(sent.chunk(parts), tokens.chunk(parts), strict=True)
                module.ahead = {
                    _token_key(part): (part, _look_up(same, module.layout).on(device)) for part, same in pairs
                }
    return sent


def _token_key(tokens: Tensor) -> Hashable:
    """Return a key that identifies a live token tensor and its contents."""
    return tokens.data_ptr(), tokens.shape, tokens.stride(), tokens._version


def _look_up(tokens: Tensor, layout: RowLayout) -> _Lookup:
    """Find the distinct rows that tokens need, and request them from their owners."""
    looked_up, place = torch.unique(tokens.long(), return_inverse=True)
    try:
        return _Lookup(place, *_exchange_requests(looked_up, layout))
    except RuntimeError as error:
        if "No backend type associated with device type cpu" not in str(error):
            raise
        raise ConfigError(
            "send_tokens: ranks exchange row requests on the host, and the process group has no CPU backend. Use"
            ' torch.distributed.init_process_group("cpu:gloo,cuda:nccl").'
        ) from error


def check_rows(module: nn.Embedding) -> None:
    """Check that an embedding can be sharded by rows.

    Raises:
        UnsupportedError: it is not a plain `nn.Embedding`, or uses options beyond row lookup.
    """
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    taken = [name for name in options if not any(getattr(module, name, None) is unset for unset in (None, False))]
    if type(module) is not nn.Embedding or taken or isinstance(module.weight, DTensor):
        what = f"an nn.Embedding with {taken[0]}" if taken else f"{type(module).__name__}, or sharded already"
        raise UnsupportedError(f"shard: by_rows takes plain embeddings, this one is {what}. Leave it out.")


def send_rows(module: nn.Embedding, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard an embedding by rows, in place, so that only looked-up rows are sent.

    Args:
        module: one that `check_rows` accepts.
        mesh: 1-D, or (replicate, shard).
        dtype: dtype in which rows are sent; None: their own.
    """
    group, whole = mesh.get_group(mesh.ndim - 1), module.weight
    each = -(-whole.shape[0] // dist.get_world_size(group))
    layout = RowLayout(group, mesh.get_group(0) if mesh.ndim > 1 else None, whole.shape[0], each, dtype)
    own = whole.detach()[layout.first : layout.first + each].clone()
    if not own.is_meta:
        own = own.to(mesh.device_type)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    sharded = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    module.weight = nn.Parameter(sharded, requires_grad=whole.requires_grad)
    module.__class__ = RowGatheredEmbedding  # like `fully_shard`: hooks and references survive
    made = cast(RowGatheredEmbedding, module)
    made.layout, made.ahead = layout, {}


def _exchange_requests(looked_up: Tensor, layout: RowLayout) -> tuple[Tensor, list[int], list[int]]:
    """Request rows, (U,) ascending, from their owners; return `rows`, `to` and `back` of a lookup."""
    count = dist.get_world_size(layout.group)
    span = torch.cat([looked_up[:1], looked_up[-1:]]).tolist()
    if span and not 0 <= span[0] <= span[1] < layout.count:
        raise ConfigError(
            f"embedding: token ids range from {span[0]} to {span[1]}, but it has {layout.count} rows: the"
            " tokenizer does not match the model's vocabulary."
        )
    ends = torch.arange(1, count + 1, device=looked_up.device) * layout.each
    wanted = torch.searchsorted(looked_up, ends).diff(prepend=ends.new_zeros(1))
    asked = torch.empty_like(wanted)
    dist.all_to_all_single(asked, wanted, group=layout.group)
    to, back = torch.stack([asked, wanted]).tolist()
    rows = looked_up.new_empty(sum(to))
    dist.all_to_all_single(rows, looked_up, to, back, group=layout.group)
    return rows - layout.first, to, back


class _Exchange(torch.autograd.Function):
    """Fetch the U looked-up rows (U, D) from their owners; backward returns the gradients to them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sent: _Lookup, layout: RowLayout) -> Tensor:
        ctx.sent, ctx.layout, ctx.weight_like = sent, layout, (weight.shape, weight.dtype)
        rows = weight[sent.rows].to(layout.dtype or weight.dtype)
        return all_to_all_rows(rows, sent.to, sent.back, layout.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, layout, (shape, dtype) = ctx.sent, ctx.layout, ctx.weight_like
        total = _sum_by_row(sent.rows, all_to_all_rows(gradient, sent.back, sent.to, layout.group), shape[0])
        copies = 1
        if layout.copies is not None:
            dist.all_reduce(total, group=layout.copies)
            copies = dist.get_world_size(layout.copies)
        return total.div_(dist.get_world_size(layout.group) * copies).to(dtype), None, None


def _sum_by_row(rows: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the FP32 sum per row of the values (S, D), for `count` rows, added in order of the sending rank.

    The order is fixed, so the result is deterministic.
    """
    ordered, order = rows.sort(stable=True)
    begins = torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device))
    return torch.segment_reduce(values[order].float(), "sum", offsets=begins, unsafe=True)  # unchecked: without waiting


def all_to_all_rows(rows: Tensor, to: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `to[r]` rows to each rank r and receive `back[r]`, as bytes: gloo supports few dtypes."""
    received = rows.new_empty(sum(back), rows.shape[1])
    dist.all_to_all_single(received.view(torch.uint8), rows.contiguous().view(torch.uint8), back, to, group=group)
    return received
