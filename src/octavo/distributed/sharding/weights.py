"""`WeightShard`: the rows of a weight that a rank keeps, as a parameter of FSDP2 that is gathered in FP8.

    on each rank   (r, K) values, FP32 or BF16           the master: what the optimizer steps
    on the wire    (r, K) codes, (r, 1) scales           one byte a weight and 4 bytes a row
    in the layer   (N, K) `FP8Tensor`                    what fprop reads, and dgrad transposed

A row's scale needs that row only, so that codes are those of the whole weight, bit for bit, and no rank waits for
another's maximum. 128x128 scales need 128 rows on one rank; a scale a tensor needs all ranks (`together`).
PyTorch calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (see torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from octavo import kernels
from octavo.kernels import Target
from octavo.numerics import Quantized
from octavo.tensor import FP8Tensor, Holder, local

if TYPE_CHECKING:
    from octavo.distributed.sharding.together import RowStacks, TensorScales

aten = torch.ops.aten
_changes = 0
"""Steps of optimizers, of which fused ones move no version, and writes through a shard, below where versions move."""


def weights_changed(*_: Any) -> None:
    """Mark the codes that ranks have sent as out of date: the next forward quantises every shard."""
    global _changes
    _changes += 1


register_optimizer_step_post_hook(weights_changed)


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
            weights_changed()
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


def state_of_values(shard: WeightShard) -> tuple[Any, ...]:
    """Return what is another, by ==, once the values of a shard may have changed."""
    held = shard.held
    memory = held.codes if isinstance(held, FP8Tensor) else held
    # The storage too: FSDP2 frees a weight's memory and keeps its storage, and another weight may get that address.
    place = memory.data_ptr(), memory.untyped_storage()._cdata, memory.shape, memory.stride(), memory.dtype
    return _changes, None if memory.is_inference() else memory._version, (*place, memory.device)


def place_of(state: tuple[Any, ...]) -> Any:
    """Return where the values lie that have this state."""
    return state[2]


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
