"""An embedding of which only the rows that are looked up are sent, not the whole of it.

    forward   the tokens' rows, each once a rank       from the rank that has them
    backward  the rows' gradients, summed on the rank  to the rank that has them, which sums them in FP32

A micro-batch looks up far fewer rows than a vocabulary has: of 8192 tokens and 128256 rows at most 6 %. Rows that are
sent are those that a gather of all would give, to the bit, and so is the gradient that each rank makes of its tokens;
that of rows which nobody looked up is zero. How many rows go where is known to no one before: the host waits for a few
numbers once in a forward pass, and with it for all that the GPU was given before, or ranks tell each other on the host,
which has the tokens before the GPU does (`send_tokens`).

U rows that this rank looks up, S rows that it sends, D dim, n ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.uploads import upload


@dataclass(frozen=True)
class Rows:
    """Which rows of an embedding each rank has, and how they are sent."""

    group: dist.ProcessGroup
    """Ranks that have different rows: each the same number, and the last ones what is left."""
    copies: dist.ProcessGroup | None
    """Ranks that have the same rows (HSDP)."""
    count: int
    """All rows."""
    each: int
    """Rows of a rank."""
    dtype: torch.dtype | None
    """What rows and their gradients are sent in; None: as they are kept."""

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return self.each * dist.get_rank(self.group)


class _Sent(NamedTuple):
    """How many rows go where: to the ranks that ask for them, and from those that have them."""

    rows: Tensor
    """(S,) int64, of this rank, counted from its first: asked for by rank 0, then by rank 1, and so on."""
    to: list[int]
    """How many of them each rank asked for."""
    back: list[int]
    """How many of its own U each rank has."""


class _Lookup(NamedTuple):
    """What a forward pass has to know of its tokens."""

    place: Tensor
    """Shape of the tokens, int64: of each, which of the U rows it is."""
    sent: _Sent

    def on(self, device: torch.device) -> _Lookup:
        """Return the same on the device."""
        return _Lookup(upload(self.place, device), self.sent._replace(rows=upload(self.sent.rows, device)))


class EmbeddingByRows(nn.Embedding):
    """An `nn.Embedding` whose weight is a DTensor, sharded by rows. All ranks must call it equally often."""

    by_rows: Rows
    ahead: dict[Hashable, tuple[Tensor, _Lookup]]
    """What is known of tokens that are still to come, which are kept: no others shall take their place in memory."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of rows is a number of the processor's
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the tokens, (*input.shape, D).

        Raises:
            ConfigError: a token is not one of the rows; the other ranks wait for this one then.
        """
        _, known = self.ahead.pop(_identity(input), (None, None))
        place, sent = _look_up(input, self.by_rows) if known is None else known
        weight = cast(DTensor, self.weight).to_local()
        rows = _Exchange.apply(weight, sent, self.by_rows)  # type: ignore[no-untyped-call]
        return F.embedding(place, rows)


def send_tokens(tokens: Tensor, device: torch.device, *models: nn.Module, parts: int = 1) -> Tensor:
    """Return tokens of the host on the device of models, whose next forward passes then wait for nothing.

    Without it an embedding whose rows are sent has the host wait for the GPU in each forward pass; other models need
    nothing of it. All ranks must call it, for tokens that they go forward with next.

    Args:
        tokens: (B, T), on the CPU.
        parts: equal parts of the batch, as `chunk` makes them, that each have a forward pass.

    Raises:
        ConfigError: a token is not one of the rows; or the process group cannot talk on the host.
    """
    sent = upload(tokens, device)
    for model in models:
        for module in model.modules():
            if isinstance(module, EmbeddingByRows):
                pairs = zip(sent.chunk(parts), tokens.chunk(parts), strict=True)
                module.ahead = {
                    _identity(part): (part, _look_up(same, module.by_rows).on(device)) for part, same in pairs
                }
    return sent


def _identity(tokens: Tensor) -> Hashable:
    """Return what tells tokens from any others that there are now, and from what was written in their place."""
    return tokens.data_ptr(), tokens.shape, tokens.stride(), tokens._version


def _look_up(tokens: Tensor, how: Rows) -> _Lookup:
    """Ask for the rows of tokens, wherever they lie."""
    looked_up, place = torch.unique(tokens.long(), return_inverse=True)
    try:
        return _Lookup(place, _ask(looked_up, how))
    except RuntimeError as error:
        if "No backend type associated with device type cpu" not in str(error):
            raise
        raise ConfigError(
            "send_tokens: ranks tell each other on the host which rows they want, and their process group has no"
            ' backend for it: torch.distributed.init_process_group("cpu:gloo,cuda:nccl").'
        ) from error


def send_rows(module: nn.Embedding, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Make an embedding one that sends rows, in place: of its weight each rank keeps its own.

    Args:
        mesh: of one dimension, or (replicate, shard).
        dtype: what rows are sent in; None: as they are kept.

    Raises:
        UnsupportedError: the embedding does more than look up rows, or is no plain `nn.Embedding`.
    """
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    taken = [name for name in options if not any(getattr(module, name, None) is unset for unset in (None, False))]
    if type(module) is not nn.Embedding or taken or isinstance(module.weight, DTensor):
        what = f"an nn.Embedding with {taken[0]}" if taken else f"{type(module).__name__}, or sharded already"
        raise UnsupportedError(f"shard: by_rows takes plain embeddings, and this one is {what}. Leave it out.")
    group, whole = mesh.get_group(mesh.ndim - 1), module.weight
    each = -(-whole.shape[0] // dist.get_world_size(group))
    rows = Rows(group, mesh.get_group(0) if mesh.ndim > 1 else None, whole.shape[0], each, dtype)
    own = whole.detach()[rows.first : rows.first + each].clone()
    if not own.is_meta:
        own = own.to(_device(mesh))
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    held = DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    module.weight = nn.Parameter(held, requires_grad=whole.requires_grad)
    module.__class__ = EmbeddingByRows  # as `fully_shard` does: hooks and references stay
    made = cast(EmbeddingByRows, module)
    made.by_rows, made.ahead = rows, {}


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _ask(looked_up: Tensor, how: Rows) -> _Sent:
    """Tell each rank which of its rows are wanted here; `looked_up`: (U,), rising."""
    count = dist.get_world_size(how.group)
    span = torch.cat([looked_up[:1], looked_up[-1:]]).tolist()
    if span and not 0 <= span[0] <= span[1] < how.count:
        raise ConfigError(
            f"embedding: tokens go from {span[0]} to {span[1]}, and it has {how.count} rows: the"
            " tokenizer is of another vocabulary than the model."
        )
    ends = torch.arange(1, count + 1, device=looked_up.device) * how.each
    wanted = torch.searchsorted(looked_up, ends).diff(prepend=ends.new_zeros(1))
    asked = torch.empty_like(wanted)
    dist.all_to_all_single(asked, wanted, group=how.group)
    to, back = torch.stack([asked, wanted]).tolist()
    rows = looked_up.new_empty(sum(to))
    dist.all_to_all_single(rows, looked_up, to, back, group=how.group)
    return _Sent(rows - how.first, to, back)


class _Exchange(torch.autograd.Function):
    """Rows (U, D) that are looked up, from the rows of all ranks; backward their gradients to whom they belong."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sent: _Sent, how: Rows) -> Tensor:
        ctx.sent, ctx.how, ctx.kept = sent, how, (weight.shape, weight.dtype)
        return _move(weight[sent.rows].to(how.dtype or weight.dtype), sent.to, sent.back, how.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sent, how, (shape, dtype) = ctx.sent, ctx.how, ctx.kept
        total = _sums(sent.rows, _move(gradient, sent.back, sent.to, how.group), shape[0])
        copies = 1
        if how.copies is not None:
            dist.all_reduce(total, group=how.copies)
            copies = dist.get_world_size(how.copies)
        return total.div_(dist.get_world_size(how.group) * copies).to(dtype), None, None


def _sums(rows: Tensor, values: Tensor, count: int) -> Tensor:
    """Return for each of `count` rows the FP32 sum of its own of the values (S, D), added one by one as they come.

    From a rank with a lower number they come first: so the order is always the same.
    """
    ordered, order = rows.sort(stable=True)
    begins = torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device))
    return torch.segment_reduce(values[order].float(), "sum", offsets=begins, unsafe=True)  # unchecked: without waiting


def _move(rows: Tensor, to: Sequence[int], back: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `to` rows to each rank and return `back` of each, as bytes: gloo knows few dtypes."""
    received = rows.new_empty(sum(back), rows.shape[1])
    dist.all_to_all_single(
        received.view(torch.uint8), rows.contiguous().view(torch.uint8), list(back), list(to), group=group
    )
    return received
