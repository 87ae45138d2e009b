"""Batched work over several weight shards: per-tensor scales of a model, and row-wise codes of a block.

FSDP2 asks for one weight at a time. Both classes compute the results of all weights when the first one is asked for, or
earlier: all-reducing many maxima takes as long as one, and so does one launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo import kernels
from octavo.distributed.sharding.weights import WeightShard, storage_key, version_key
from octavo.kernels.weights import Stack, has_one_launch, quantize_stack
from octavo.nn.weight_codes import split_rows
from octavo.numerics import PER_TENSOR, Quantized
from octavo.numerics.granularity import tile_amax
from octavo.numerics.quantize import to_codes
from octavo.numerics.scaling import scale_from_amax


class TensorwiseScales:
    """Per-tensor scales of all weights of a model, by one all-reduce whenever the weights have changed.

    Weights that are fused into one GEMM share a scale. All ranks must change their weights at the same time, as
    optimizers do: each rank decides by its own shards.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []

    def add(self, module: nn.Module, attribute: str, group: Hashable) -> None:
        """Add the weight of a module; weights of one group share a scale."""
        self._members.append(_Member(weakref.ref(module), attribute, group))

    def refresh(self, shard: WeightShard, mesh: DeviceMesh) -> None:
        """Update the amax of all weights over all ranks, unless this shard's is current."""
        if shard.global_amax is not None and shard.global_amax[0] == version_key(shard):
            return
        found = _found(self._members)
        shards = [own for _, own in found]
        amax = torch.cat([tile_amax(own.wrapped, PER_TENSOR).reshape(1) for own in shards])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        groups: dict[Hashable, list[int]] = {}
        for index, (member, _) in enumerate(found):
            groups.setdefault(member.group, []).append(index)
        for indices in groups.values():
            largest = amax[indices].amax()
            for index in indices:
                shards[index].global_amax = version_key(shards[index]), largest

    def quantize(self, shard: WeightShard) -> Quantized:
        """Return a shard in FP8, with the scale of the whole weight."""
        assert shard.global_amax is not None
        target = shard.spec.target
        scale, inverse = scale_from_amax(shard.global_amax[1].reshape(1, 1), target.fmt, target.scaling)
        return Quantized(to_codes(shard.wrapped.float() * inverse, target.fmt), scale, target.tile)


class RowwiseBatch:
    """Quantises the row-wise scaled weights of a block: one launch for all weights with the same row length.

    Runs right after an optimizer step, or when the first changed weight is gathered. Per-weight launches at gather time
    would make the host fall behind the GPU.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._made: dict[Hashable, _StackCodes] = {}
        _in_use.add(self)

    def add(self, module: nn.Module, attribute: str) -> None:
        """Add the weight of a module."""
        self._members.append(_Member(weakref.ref(module), attribute))

    def quantize(self, shard: WeightShard) -> Quantized:
        """Return a shard in FP8, quantised together with its peers unless that is done already."""
        kind = _kind(shard)
        known = self._made.get(kind)
        if known is not None and (part := known.part(shard)) is not None:
            return part
        peers = [own for _, own in _found(self._members) if _kind(own) == kind]
        target = shard.spec.target
        if not any(peer is shard for peer in peers) or not has_one_launch([peer.wrapped for peer in peers], target):
            return kernels.quantize(shard.wrapped, *target)
        made = self._made[kind] = _StackCodes.of(peers, known)
        return next(part for part, peer in zip(made.parts, peers, strict=True) if peer is shard)

    def requantize(self) -> None:
        """Requantise the stacks that are out of date."""
        for kind, made in self._made.items():
            shards = [own for own in (known() for known in made.shards) if own is not None and _kind(own) == kind]
            if len(shards) == len(made.shards) and made.keys != [version_key(own) for own in shards]:
                self._made[kind] = _StackCodes.of(shards, made)


_in_use: weakref.WeakSet[RowwiseBatch] = weakref.WeakSet()


def _stepped(*_: Any) -> None:
    """Requantise after an optimizer step, when the host is ahead of the GPU; in a forward pass it may not be."""
    for batch in list(_in_use):
        batch.requantize()


register_optimizer_step_post_hook(_stepped)  # after the hook of `weights`, which detects changes


def _kind(shard: WeightShard) -> tuple[Any, ...]:
    """Return the key shared by weights that one launch can quantise."""
    inner = shard.wrapped
    return type(inner), inner.shape[1], inner.dtype, inner.device, shard.spec.target


class _StackCodes(NamedTuple):
    """Codes of several shards, with the version keys of the values that they were made of."""

    shards: list[weakref.ref[WeightShard]]
    keys: list[tuple[Any, ...]]
    stack: Stack
    parts: list[Quantized]
    """Views of the stack, one per shard."""

    @classmethod
    def of(cls, shards: list[WeightShard], before: _StackCodes | None) -> _StackCodes:
        """Quantise shards into the memory of `before`, whose old contents FSDP2 has copied already.

        It copies on a separate stream, which waits for the current one when a forward pass begins.
        """
        values, keys = [shard.wrapped for shard in shards], [version_key(shard) for shard in shards]
        in_place = before is not None and list(map(storage_key, keys)) == list(map(storage_key, before.keys))
        into, rows = (None, None) if before is None else before.stack
        stack = quantize_stack(values, shards[0].spec.target, into, rows if in_place else None)
        parts = split_rows(stack.quantized, [len(held) for held in values])
        assert parts is not None  # row-wise scales are always separable
        return cls([weakref.ref(shard) for shard in shards], keys, stack, parts)

    def part(self, shard: WeightShard) -> Quantized | None:
        """Return the codes of a shard, or None where they are missing or out of date."""
        for known, key, part in zip(self.shards, self.keys, self.parts, strict=True):
            if known() is shard:
                return part if key == version_key(shard) else None
        return None


@dataclass(eq=False)
class _Member:
    """A weight of a module, held by weak references: shards refer back here, and a cycle would delay freeing memory."""

    module: weakref.ref[nn.Module]
    attribute: str
    group: Hashable = None
    shard: weakref.ref[WeightShard] | None = None

    def find(self) -> WeightShard | None:
        """Return the weight's shard; while the module holds the gathered weight, the shard seen before."""
        module = self.module()
        parameter = None if module is None else module._parameters[self.attribute]
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, WeightShard):
            self.shard = weakref.ref(parameter._local_tensor)
        return None if self.shard is None else self.shard()


def _found(members: Sequence[_Member]) -> list[tuple[_Member, WeightShard]]:
    """Return the members that are still alive, with their shards."""
    pairs = [(member, member.find()) for member in members]
    return [(member, shard) for member, shard in pairs if shard is not None]
