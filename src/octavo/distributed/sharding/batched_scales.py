"""Codes of the weights of a gather unit (a block, or what is left of the model), made together.

FSDP2 asks for the codes of one weight after another, in each gather of the unit. The first one asked for makes those of
all, so that there is one launch, and for per-tensor scales one all-reduce of all maxima. Each is handed out once: the
next gather makes them again, of the values that the shards have then. So no write to a weight goes unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from octavo import kernels
from octavo.distributed.sharding.weights import WeightShard
from octavo.kernels.weights import Stack, has_one_launch, quantize_stack
from octavo.nn.weight_codes import split_rows
from octavo.numerics import PER_TENSOR, Quantized
from octavo.numerics.granularity import tile_amax
from octavo.numerics.quantize import to_codes
from octavo.numerics.scaling import scale_from_amax


class UnitCodes:
    """Makes the codes of all shards of a gather unit that are quantised in one way, when the first is asked for."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._stacks: dict[Hashable, _Stacked] = {}
        """By kind of shard, what one launch has made; the next one writes into its memory."""

    def add(self, module: nn.Module, attribute: str, group: Hashable) -> None:
        """Add the weight of a module. Weights of one group, which a GEMM reads as one, share a per-tensor scale."""
        self._members.append(_Member(weakref.ref(module), attribute, group))

    def take(self, shard: WeightShard, mesh: DeviceMesh) -> Quantized:
        """Return the codes of a shard, which are made again when they are asked for again."""
        if shard.pending is None:
            self._quantize(shard, mesh)
        made, shard.pending = shard.pending, None
        assert made is not None
        return made

    @torch.no_grad()
    def _quantize(self, shard: WeightShard, mesh: DeviceMesh) -> None:
        """Quantise a shard and those that are quantised in the same way."""
        found = [(member.group, own) for member in self._members if (own := member.find()) is not None]
        alike = [(group, own) for group, own in found if own.kind == shard.kind]
        if not any(own is shard for _, own in alike):
            alike = [(None, shard)]
        peers = [own for _, own in alike]
        whole = shard.spec.target.tile.rows is None
        parts = _per_tensor(alike, mesh) if whole else self._by_rows(peers)
        for own, part in zip(peers, parts, strict=True):
            own.pending = part

    def _by_rows(self, shards: Sequence[WeightShard]) -> Sequence[Quantized]:
        values, target, kind = [shard.wrapped for shard in shards], shards[0].spec.target, shards[0].kind
        places = [(held.data_ptr(), held.shape, held.stride()) for held in values]
        known = self._stacks.get(kind)
        is_known = known is not None and known.places == places
        if not (is_known or has_one_launch(values, target)):
            return [kernels.quantize(held, *target) for held in values]
        # Into the memory of the gather before, which FSDP2 has copied: it copies on the stream that this runs on, or
        # on one that this waits for.
        into, rows = (None, None) if known is None else known.stack
        stack = quantize_stack(values, target, into, rows if is_known else None)
        if known is None or not is_known:
            parts = split_rows(stack.quantized, [len(held) for held in values])
            assert parts is not None  # row-wise scales are always separable
            known = self._stacks[kind] = _Stacked(places, stack, parts)
        return known.parts


class _Stacked(NamedTuple):
    """Codes of the shards of one kind, in the memory of one launch."""

    places: list[Any]
    """Where the shards lie."""
    stack: Stack
    parts: Sequence[Quantized]
    """Views, one per shard."""


def _per_tensor(shards: Sequence[tuple[Hashable, WeightShard]], mesh: DeviceMesh) -> Sequence[Quantized]:
    """Quantise shards with the scales of the whole weights: one all-reduce of all maxima."""
    amax = torch.cat([tile_amax(own.wrapped, PER_TENSOR).reshape(1) for _, own in shards])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
    groups: dict[Hashable, list[int]] = {}
    for index, (group, _) in enumerate(shards):
        groups.setdefault(group, []).append(index)
    return [_with_amax(own, amax[groups[group]].amax()) for group, own in shards]


def _with_amax(shard: WeightShard, amax: Tensor) -> Quantized:
    target = shard.spec.target
    scale, inverse = scale_from_amax(amax.reshape(1, 1), target.fmt, target.scaling)
    return Quantized(to_codes(shard.wrapped.float() * inverse, target.fmt), scale, target.tile)


@dataclass(eq=False)
class _Member:
    """A weight of a module, held by weak references: shards refer back here, and a cycle would delay freeing memory."""

    module: weakref.ref[nn.Module]
    attribute: str
    group: Hashable
    shard: weakref.ref[WeightShard] | None = None

    def find(self) -> WeightShard | None:
        """Return the weight's shard; while the module holds the gathered weight, the shard seen before."""
        module = self.module()
        parameter = None if module is None else module._parameters[self.attribute]
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, WeightShard):
            self.shard = weakref.ref(parameter._local_tensor)
        return None if self.shard is None else self.shard()
