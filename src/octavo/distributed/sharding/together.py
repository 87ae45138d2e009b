"""What is found for several shards at once: a scale that a whole tensor has, and the codes of a block's weights.

FSDP2 asks for one weight after the other. Both answer with what they make of all of them when the first is asked for,
or before: the reduction of many maxima takes as long as that of one, and so does a launch.
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
from octavo.distributed.sharding.weights import WeightShard, place_of, state_of_values
from octavo.kernels.weights import Stack, has_one_launch, quantize_stack
from octavo.nn.weight_codes import split_rows
from octavo.numerics import PER_TENSOR, Quantized
from octavo.numerics.granularity import tile_amax
from octavo.numerics.quantize import to_codes
from octavo.numerics.scaling import scale_from_amax


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


def _stepped(*_: Any) -> None:
    """Quantise what an optimizer has changed: the host is ahead of the GPU then; in a forward pass it may not be."""
    for stacks in list(_in_use):
        stacks.renew()


register_optimizer_step_post_hook(_stepped)  # after that of `weights`, by which changes are known


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
        stayed = before is not None and [place_of(one) for one in states] == [place_of(one) for one in before.states]
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
