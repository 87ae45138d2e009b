"""`WeightShard`: the rows of a weight that a rank keeps, as a parameter of FSDP2 that is gathered in FP8.

    on each rank   (r, K) values, FP32 or BF16           the master: what the optimizer steps
    on the wire    (r, K) codes, (r, 1) scales           one byte a weight and 4 bytes a row
    in the layer   (N, K) `FP8Tensor`                    what fprop reads, and dgrad transposed

A row's scale needs that row only, so that codes are those of the whole weight, bit for bit, and no rank waits for
another's maximum. 128x128 scales need 128 rows on one rank; a scale a tensor needs all ranks (`TensorScales`).
PyTorch calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (see torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from octavo import kernels
from octavo.kernels import Target
from octavo.kernels.weights import Stack, has_one_launch, quantize_stack
from octavo.nn.weights import split_rows, state_of
from octavo.numerics import PER_TENSOR, Quantized
from octavo.numerics.granularity import tile_amax
from octavo.numerics.quantize import to_codes
from octavo.numerics.scaling import scale_from_amax
from octavo.tensor import FP8Tensor, Holder, local

aten = torch.ops.aten
_changes = 0
"""Steps of optimizers, of which fused ones move no version, and writes through a shard, below where versions move."""


def _changed(*_: Any) -> None:
    global _changes
    _changes += 1


def _stepped(*_: Any) -> None:
    """Quantise what an optimizer has changed: the host is ahead of the GPU then; in a forward pass it may not be."""
    _changed()
    for stacks in list(_in_use):
        stacks.renew()


register_optimizer_step_post_hook(_stepped)


@dataclass(frozen=True)
class Gather:
    """How a weight (N, K) is gathered."""

    rows: int
    """N, of all ranks."""
    target: Target
    """What its values become."""
    scales: TensorScales | None = None
    """What finds the scale of a weight that has one for all its rows."""
    stacks: RowStacks | None = None
    """What quantises a weight that has a scale a row along with others of its block."""


class WeightShard(Holder):
    """Rows of a weight. It has the shape and dtype of `held`, and is used as a parameter's local tensor only."""

    how: Gather
    kept: tuple[Any, Quantized] | None
    """What was sent last, and the state of the values that it was made of."""
    largest: tuple[Any, Tensor] | None
    """The largest magnitude on all ranks, FP32 of shape (), and the state that the values had."""

    @staticmethod
    def __new__(cls, values: Tensor, how: Gather) -> WeightShard:  # noqa: D102
        shard: WeightShard = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        shard.held, shard.how = values, how
        shard.kept = shard.largest = None
        return shard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightShard({self.held!r}, sent as {self.how.target})"

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what this rank sends, and its scale, which is not sent where it is known to all."""
        # The signature with more arguments cannot send scales of an uneven shard: it wants all of one shape.
        rows = -(-self.how.rows // mesh.size())
        if self.how.scales is not None:
            self.how.scales.refresh(self, mesh)
        made = self.quantized(rows)
        return (made.codes,) if self.how.scales is not None else (made.codes, made.scale), made.scale

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[FP8Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, in the memory that FSDP2 gathered into; `out` is in it already.

        PyTorch gathers over one rank by copying the first tensor only: the scale is then that of `scale`.
        """
        target, rows = self.how.target, self.how.rows
        sent = len(outputs) > 1
        if out is not None:
            out = local(out)  # a DTensor where tensor parallel has cut the weight
            assert isinstance(out, FP8Tensor)
            if not sent:  # what backward has kept of it is the same weight's scale, as all that FSDP2 gathers again
                with torch.autograd._unsafe_preserve_version_counter(out.scale):  # type: ignore[attr-defined]
                    out.scale.copy_(scale)
            return None
        codes = outputs[0][:rows]
        scale = outputs[1][: target.tile.scale_shape(*codes.shape)[0]] if sent else scale.clone()
        return FP8Tensor(codes, scale, target.tile, dtype, target.scaling), ()

    def quantized(self, rows: int) -> Quantized:
        """Return the codes and scales of this shard, filled up with zeros to `rows`; made once for each of its values.

        What an FP8 weight is made of is sent as it is.
        """
        state = state_of_values(self)
        if self.kept is not None and self.kept[0] == (state, rows):
            return self.kept[1]
        target, values = self.how.target, self.held
        with torch.no_grad():
            if isinstance(values, FP8Tensor):
                made = values.quantized
            elif self.how.scales is not None:
                made = self.how.scales.quantize(self)
            elif self.how.stacks is not None:
                made = self.how.stacks.quantize(self)
            else:
                made = kernels.quantize(values, *target)
            made = _filled_up(made, rows)
        if not isinstance(values, FP8Tensor) or made.codes is not values.codes:
            self.kept = (state, rows), made
        return made

    def like(self, values: Tensor) -> WeightShard:
        """Return other values, gathered as these are."""
        return WeightShard(values, self.how)

    def __tensor_flatten__(self) -> tuple[list[str], Gather]:
        return ["held"], self.how

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], how: Gather, size: Any, stride: Any) -> WeightShard:
        return cls(inner["held"], how)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        shard: WeightShard = args[0]
        if func is aten.view.default and isinstance(shard.held, FP8Tensor) and tuple(args[1]) != tuple(shard.shape):
            return shard.like(shard.held.codes.view(args[1]))  # what FSDP2 keeps, to know the memory again
        inner, named = tree_map_only(WeightShard, lambda one: one.held, (args, kwargs or {}))
        result = func(*inner, **named)
        if func._schema.is_mutable:
            _changed()
        if func not in _STAY_SHARDS or not isinstance(shard, WeightShard):
            return result
        return shard if result is shard.held else tree_map_only(Tensor, shard.like, result)


# FSDP2 asks for the signature each time it gathers, and to find it takes as long as all that the method does.
WeightShard.fsdp_pre_all_gather.__signature__ = inspect.signature(WeightShard.fsdp_pre_all_gather)  # type: ignore[attr-defined]

_STAY_SHARDS = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}
"""Operations of FSDP2, checkpoints and `Module.to`, whose results are shards too. Results of others are plain."""


class TensorScales:
    """Finds the scales of all weights that have one a tensor, by one all-reduce once they have changed.

    Weights that are computed together, as one matrix, have one scale. Every rank must change its weights at the same
    time, as optimizers do: each rank decides by its own shards.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []

    def add(self, module: nn.Module, attribute: str, group: Hashable) -> None:
        """Add the weight of a module; those of one group have the same scale."""
        self._members.append(_Member(weakref.ref(module), attribute, group))

    def refresh(self, shard: WeightShard, mesh: DeviceMesh) -> None:
        """See to it that the maximum of a weight is that of its values now: over all ranks, for all weights at once."""
        if shard.largest is not None and shard.largest[0] == state_of_values(shard):
            return
        found = _found(self._members)
        shards = [own for _, own in found]
        amax = torch.cat([tile_amax(own.held, PER_TENSOR).reshape(1) for own in shards])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        groups: dict[Hashable, list[int]] = {}
        for index, (member, _) in enumerate(found):
            groups.setdefault(member.group, []).append(index)
        for indices in groups.values():
            largest = amax[indices].amax()
            for index in indices:
                shards[index].largest = state_of_values(shards[index]), largest

    def quantize(self, shard: WeightShard) -> Quantized:
        """Return a shard in FP8 with the scale of the whole weight."""
        assert shard.largest is not None
        target = shard.how.target
        scale, inverse = scale_from_amax(shard.largest[1].reshape(1, 1), target.fmt, target.scaling)
        return Quantized(to_codes(shard.held.float() * inverse, target.fmt), scale, target.tile)


class RowStacks:
    """Quantises the weights of a block that have a scale a row, all whose rows are as long in one launch.

    It is done once an optimizer has made its step, or for all of them when the first that has changed is gathered.
    FSDP2 asks for one weight after the other, and a host that has much to do for each falls behind its GPU.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._made: dict[Hashable, _Made] = {}
        _in_use.add(self)

    def add(self, module: nn.Module, attribute: str) -> None:
        """Add the weight of a module."""
        self._members.append(_Member(weakref.ref(module), attribute))

    def quantize(self, shard: WeightShard) -> Quantized:
        """Return a shard in FP8, made with those of its peers unless it has been made with them already."""
        kind = _kind(shard)
        known = self._made.get(kind)
        if known is not None and (part := known.part(shard)) is not None:
            return part
        peers = [own for _, own in _found(self._members) if _kind(own) == kind]
        target = shard.how.target
        if not any(peer is shard for peer in peers) or not has_one_launch([peer.held for peer in peers], target):
            return kernels.quantize(shard.held, *target)
        made = self._made[kind] = _Made.of(peers, known)
        return next(part for part, peer in zip(made.parts, peers, strict=True) if peer is shard)

    def renew(self) -> None:
        """Make again what has been made before and is out of date."""
        for kind, made in self._made.items():
            shards = [own for own in (known() for known in made.shards) if own is not None and _kind(own) == kind]
            if len(shards) == len(made.shards) and made.states != [state_of_values(own) for own in shards]:
                self._made[kind] = _Made.of(shards, made)


_in_use: weakref.WeakSet[RowStacks] = weakref.WeakSet()


def _kind(shard: WeightShard) -> tuple[Any, ...]:
    """Return what weights have in common that one launch may quantise."""
    held = shard.held
    return type(held), held.shape[1], held.dtype, held.device, shard.how.target


class _Made(NamedTuple):
    """The codes of some shards, and the state of the values that they were made of."""

    shards: list[weakref.ref[WeightShard]]
    states: list[tuple[Any, ...]]
    stack: Stack
    parts: list[Quantized]
    """Of each shard, views of the stack."""

    @classmethod
    def of(cls, shards: list[WeightShard], before: _Made | None) -> _Made:
        """Quantise shards, into the memory of `before`: FSDP2 has copied what was there.

        It copies on a stream of its own, which waits for the current one when a forward pass begins.
        """
        values, states = [shard.held for shard in shards], [state_of_values(shard) for shard in shards]
        stayed = before is not None and [_place(one) for one in states] == [_place(one) for one in before.states]
        into, rows = (None, None) if before is None else before.stack
        stack = quantize_stack(values, shards[0].how.target, into, rows if stayed else None)
        parts = split_rows(stack.quantized, [len(held) for held in values])
        assert parts is not None  # a row's scale is its own
        return cls([weakref.ref(shard) for shard in shards], states, stack, parts)

    def part(self, shard: WeightShard) -> Quantized | None:
        """Return the codes of a shard, None where they are not there or not those of its values now."""
        for known, state, part in zip(self.shards, self.states, self.parts, strict=True):
            if known() is shard:
                return part if state == state_of_values(shard) else None
        return None


@dataclass(eq=False)
class _Member:
    """A weight of a module. It is not kept alive: shards know those who know them, and tensors are freed at once."""

    module: weakref.ref[nn.Module]
    attribute: str
    group: Hashable = None
    shard: weakref.ref[WeightShard] | None = None

    def find(self) -> WeightShard | None:
        """Return the weight's shard: where the module has the whole weight now, the one it had before."""
        module = self.module()
        parameter = None if module is None else module._parameters[self.attribute]
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, WeightShard):
            self.shard = weakref.ref(parameter._local_tensor)
        return None if self.shard is None else self.shard()


def _found(members: Sequence[_Member]) -> list[tuple[_Member, WeightShard]]:
    """Return the members that are still there, with their shards."""
    pairs = [(member, member.find()) for member in members]
    return [(member, shard) for member, shard in pairs if shard is not None]


def state_of_values(shard: WeightShard) -> tuple[Any, ...]:
    """Return what is another, by ==, once the values of a shard may have changed."""
    held = shard.held
    return _changes, *state_of([held.codes if isinstance(held, FP8Tensor) else held])


def _place(state: tuple[Any, ...]) -> Any:
    """Return where the values lie that have this state."""
    _, _, (_, *place) = state
    return place


def _filled_up(made: Quantized, rows: int) -> Quantized:
    height = made.granularity.rows
    scale = made.scale if height is None else _with_rows(made.scale, -(-rows // height))
    return Quantized(_with_rows(made.codes, rows), scale, made.granularity)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    full = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        full[: x.shape[0]].view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return full
