"""`WeightShard`: a rank's rows of a weight, an FSDP2 parameter that is all-gathered in FP8.

    on each rank   (r, K) values, FP32 or BF16           the master that the optimizer steps
    on the wire    (r, K) codes, (r, 1) scales           one byte per weight and 4 bytes per row
    in the layer   (N, K) `FP8Tensor`                    read by fprop, and transposed by dgrad

Row-wise scales depend on one row only, so the codes equal those of the whole weight bit for bit, and no rank waits for
another rank's amax. 128x128 scales need 128 rows on one rank; per-tensor scales need all ranks (`UnitCodes`).
Each gather quantises the values that the shard has then: a write between two gathers is seen, however it is made.
INT8 codes (`shard(..., gather_int8=True)`) are decoded into values when they arrive: dgrad makes other codes of these.
PyTorch calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` (see torch.distributed.fsdp.fully_shard).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.quantize import scattered_rows
from octavo.kernels.quantize.scattered_rows import ScatteredRows, quantize_scattered_rows
from octavo.nn.weight_codes import split_rows
from octavo.numerics import PER_TENSOR, Quantized, scale_from_amax, tile_amax, to_codes
from octavo.tensor import FP8Tensor, WrapperTensor, local

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherSpec:
    """Gathering of one weight (N, K)."""

    rows: int
    """N, over all ranks."""
    each: int
    """Rows that a rank sends, the last ranks with padding."""
    target: QuantSpec
    """Format and scaling of the codes."""
    decodes: bool
    """Whether layers read values, decoded from the codes."""
    unit: UnitCodes
    """Quantises it together with others of its gather unit."""


class WeightShard(WrapperTensor):
    """Rows of a weight, with the shape and dtype of `wrapped`. Used only as the local tensor of a DTensor parameter."""

    spec: GatherSpec
    kind: Hashable
    """Key shared by shards that are quantised in one launch, or with one reduction of scales."""
    pending: Quantized | None
    """Codes made with those of another weight in the gather that is under way, until it asks for them."""

    @staticmethod
    def __new__(cls, values: Tensor, spec: GatherSpec) -> WeightShard:  # noqa: D102
        shard: WeightShard = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        shard.wrapped, shard.spec, shard.pending = values, spec, None
        is_per_tensor = spec.target.tile.rows is None
        alike = () if is_per_tensor else (type(values), values.shape[1:], values.dtype, values.device)
        shard.kind = (spec.target, *alike)
        return shard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WeightShard({self.wrapped!r}, sent as {self.spec.target})"

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tensors that this rank sends, and its scale; a per-tensor scale is known to all and not sent."""
        # FSDP2's longer signature requires equal shapes, and cannot send the scales of an uneven shard.
        made = self.wrapped.quantized if isinstance(self.wrapped, FP8Tensor) else self.spec.unit.take(self, mesh)
        made = _padded(made, self.spec.each)
        return (made.codes,) if made.granularity.rows is None else (made.codes, made.scale), made.scale

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight in the memory that FSDP2 gathered into, or None where `out` already views it.

        Decoded values have memory of their own, which FSDP2 frees and allocates with that of the codes.

        Over a single rank PyTorch copies the first tensor only; the scale is then taken from `scale`.
        """
        target, rows = self.spec.target, self.spec.rows
        sent = len(outputs) > 1
        if not sent and scale.is_cuda:
            scale.record_stream(torch.cuda.current_stream())  # it was made on the stream that FSDP2 gathers on
        out = None if out is None else local(out)  # a DTensor under tensor parallel
        if self.spec.decodes:
            codes = outputs[0][:rows]
            made = Quantized(codes, outputs[1][:rows] if sent else scale, target.tile)
            with _unchanged(out):
                values = kernels.decode_rows(made, target.rotation, dtype, None if out is None else out.detach())
            return (values, (values,)) if out is None else None
        if out is not None:
            assert isinstance(out, FP8Tensor)
            if not sent:  # autograd may have saved this scale: it expects the same values of FSDP2's re-gathers
                with _unchanged(out.scale):
                    out.scale.copy_(scale)
            return None
        codes = outputs[0][:rows]
        scale = outputs[1][: target.tile.scale_shape(*codes.shape)[0]] if sent else scale.clone()
        return FP8Tensor(codes, scale, target.tile, dtype, target.scaling), ()

    def like(self, values: Tensor) -> WeightShard:
        """Return other values with the same gather specification."""
        return WeightShard(values, self.spec)

    def __tensor_flatten__(self) -> tuple[list[str], GatherSpec]:
        return ["wrapped"], self.spec

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], spec: GatherSpec, size: Any, stride: Any) -> WeightShard:
        return cls(inner["wrapped"], spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        shard: WeightShard = args[0]
        if func is aten.view.default and isinstance(shard.wrapped, FP8Tensor) and tuple(args[1]) != tuple(shard.shape):
            return shard.like(shard.wrapped.codes.view(args[1]))  # FSDP2 keeps this view to identify the memory
        inner, named = tree_map_only(WeightShard, lambda one: one.wrapped, (args, kwargs or {}))
        result = func(*inner, **named)
        if func not in _SHARD_PRESERVING or not isinstance(shard, WeightShard):
            return result
        return shard if result is shard.wrapped else tree_map_only(Tensor, shard.like, result)


# FSDP2 inspects the signature at each gather, which would take as long as the method itself.
WeightShard.fsdp_pre_all_gather.__signature__ = inspect.signature(WeightShard.fsdp_pre_all_gather)  # type: ignore[attr-defined]

_SHARD_PRESERVING = {
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
"""Operations of FSDP2, checkpoints and `Module.to` whose results are shards again. Others return plain tensors."""


def _unchanged(x: Tensor | None) -> AbstractContextManager[None]:
    """Let writes to x go uncounted: autograd may have saved it, and FSDP2's gathers write the same values again."""
    if x is None:
        return nullcontext()
    return torch.autograd._unsafe_preserve_version_counter(x)  # type: ignore[attr-defined]


def _padded(made: Quantized, rows: int) -> Quantized:
    if made.codes.shape[0] == rows and made.codes.is_contiguous() and made.scale.is_contiguous():
        return made
    height = made.granularity.rows
    scale = made.scale if height is None else _padded_rows(made.scale, -(-rows // height))
    return Quantized(_padded_rows(made.codes, rows), scale, made.granularity)


def _padded_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    full = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    if x.numel():
        full[: x.shape[0]].view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return full


Memory = dict[Hashable, Quantized]
"""Buffers for codes to be sent, by kind of shard, number of rows and stream. All gather units of a model share them: on
that stream, FSDP2 copies the codes of one unit before it asks for those of the next."""


class UnitCodes:
    """Makes the codes of all shards of a gather unit that are quantised in one way, when the first is asked for.

    FSDP2 asks for the codes of one weight after another, in each gather of the unit (a block, or what is left of the
    model). All are made together, by one launch, and for per-tensor scales one all-reduce of all maxima. Each is handed
    out once: the next gather makes them again.
    """

    def __init__(self, memory: Memory) -> None:
        self._members: list[_Member] = []
        self._memory = memory
        self._launches: dict[Hashable, _Launch] = {}
        """The last launch by kind of shard; the next one writes to the same memory."""

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
        is_member = any(own is shard for _, own in alike)
        if not is_member:
            alike = [(None, shard)]
        peers = [own for _, own in alike]
        if shard.spec.target.tile.rows is None:
            parts = _per_tensor(alike, mesh)
        else:
            parts = (is_member and self._in_one_launch(peers)) or _one_by_one(peers)
        for own, part in zip(peers, parts, strict=True):
            own.pending = part

    def _in_one_launch(self, shards: Sequence[WeightShard]) -> Sequence[Quantized] | None:
        """Return the row-wise codes of all members of a kind; None where one launch cannot make them."""
        values, target, kind = [shard.wrapped for shard in shards], shards[0].spec.target, shards[0].kind
        places = [(held.data_ptr(), held.shape, held.stride()) for held in values]
        known = self._launches.get(kind)
        if known is not None and known.places != places:
            known = None
        if known is None and not scattered_rows.is_supported(values, target):
            return None
        key = kind, sum(map(len, values)), _stream(values[0].device)
        table = None if known is None else known.made.table
        made = quantize_scattered_rows(values, target, self._memory.get(key), table)
        if known is None or made.quantized is not known.made.quantized:
            self._memory[key] = made.quantized
            parts = split_rows(made.quantized, [len(held) for held in values])
            assert parts is not None  # row-wise scales are always separable
            known = self._launches[kind] = _Launch(places, made, parts)
        return known.parts


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _one_by_one(shards: Sequence[WeightShard]) -> Sequence[Quantized]:
    return [kernels.quantize(shard.wrapped, *shard.spec.target) for shard in shards]


class _Launch(NamedTuple):
    """Codes of the shards of one kind, made by one launch."""

    places: list[Any]
    """Addresses, shapes and strides of the shards."""
    made: ScatteredRows
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
