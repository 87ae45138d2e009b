"""Quantised weights: made once for each value a weight takes, kept for as long as the weight lives.

Linear layers that share an input are one layer whose weight is the stack of theirs, so what is kept belongs to a list
of weights. Compiled code meets only the operators at the end of this file. They take the weights themselves and find
the codes when they run: no codes stand in a graph, none are saved for backward, and each call sees whether a weight
has changed. It has when its version counter has moved, or any optimizer has made a step: PyTorch's fused optimizers
write without moving the counter. Writing through `weight.data` moves neither; call `weights_changed()` after it.

A weight that is an `FP8Tensor` has codes of its own, and nothing is kept of it: see `octavo.nn.own_codes`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo import kernels
from octavo.kernels import Target, ledger
from octavo.kernels.operator import define
from octavo.kernels.target import target_of
from octavo.kernels.weights import has_one_launch, quantize_stack
from octavo.nn import own_codes
from octavo.nn.own_codes import has_codes, joined, stack_of, transpose_codes
from octavo.numerics import PER_COLUMN, Quantized, granularity_named
from octavo.tensor import FP8Tensor, implements


@dataclass(eq=False)
class _Kept:
    """The codes of one stack of weights, and what they were made from."""

    stack: Quantized
    state: tuple[Any, ...] | None
    """What they were made from; None: who knows, a CUDA graph writes here whenever it is replayed."""
    places: list[tuple[Any, ...]]
    """The memory that they were made from."""
    rows: Any = None
    """Where every row lies, for the kernel that takes many weights in one launch."""
    finalizers: tuple[weakref.finalize[Any, Any], ...] = ()
    """What drops this when a weight dies."""


_kept: dict[tuple[Any, ...], _Kept] = {}
_at: weakref.WeakValueDictionary[tuple[Any, ...], _Kept] = weakref.WeakValueDictionary()
"""The same by the memory of the weights: what a checkpoint hands to backward is another tensor object there."""
_changes = 0
_steps = 0
"""Of optimizers: these change weights that are trained, and no others."""
_replayed: set[Any] = set()
"""Weights (`id`) that a captured CUDA graph has read. A replay may change them unseen: they are never known again."""


def weights_changed() -> None:
    """Mark every kept weight as out of date: the next forward quantises it anew."""
    global _changes
    _changes += 1


def _stepped(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_stepped)


def forget(weight: Tensor) -> None:
    """Drop all that is kept of one weight."""
    for key in [key for key in _kept if id(weight) in key[2:]]:
        kept = _kept.pop(key, None)
        for finalizer in () if kept is None else kept.finalizers:
            finalizer.detach()


Reading = Callable[[Tensor], Tensor]
"""Gives the matrix that a GEMM reads of a weight."""


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as the matrix (N, K) of its GEMM: that of a convolution, (N, C, *kernel), channels last."""
    return weight if weight.dim() == 2 else weight.movedim(1, -1).flatten(1)


def quantized_weights(
    weights: Sequence[Tensor], target: Target, transposed: bool = False, read: Reading = as_matrix
) -> Quantized:
    """Return the stack (N, K) of weights (N_i, K), or its transpose (K, N), quantised as `target` says.

    Nothing is computed where it is there already. Where one launch quantises all of them, a change is written into the
    same memory. Codes that an FP8 weight has are taken as they are; several are copied into one stack.

    Args:
        read: how a weight is a matrix.

    Raises:
        UnsupportedError: an FP8 weight has codes of another kind, or its transpose is to be quantised by itself.
    """
    if has_codes(weights):
        return stack_of(weights, target, transposed)
    way = target, (transposed, read)
    key = (*way, *map(id, weights))
    state, records = state_of(weights), _records(weights[0])
    kept = _kept.get(key)
    if kept is not None and kept.state == state and not records:
        return kept.stack
    if kept is None and (stack := _of_the_same_memory(weights, *way)) is not None and not records:
        return stack
    if records:
        _distrust(weights)
    ledger.count_weights(len(weights))
    with torch.inference_mode(False), torch.no_grad():  # what is kept must also serve a training step
        stack, rows = _quantize(weights, read, target, transposed, kept)
    if any(weight.is_inference() for weight in weights):  # such a tensor counts no versions
        return stack
    finalizers = _finalizers(weights, key) if kept is None else kept.finalizers
    known = state if _replayed.isdisjoint(key[2:]) else None
    _kept[key] = _Kept(stack, known, [_place(w) for w in weights], rows, finalizers)
    _at[*way, *(w.data_ptr() for w in weights)] = _kept[key]
    return stack


def _of_the_same_memory(weights: Sequence[Tensor], target: Target, how: tuple[Any, ...]) -> Quantized | None:
    """Return what is kept of the weights that these are detached views of, unless it is out of date."""
    kept = _at.get((target, how, *(weight.data_ptr() for weight in weights)))
    if kept is None or kept.state is None or kept.state[1:] != state_of(weights)[1:]:
        return None
    changes, steps = kept.state[0]
    must_count = steps is not None or any(weight.requires_grad for weight in weights)
    return kept.stack if changes == _changes and (steps == _steps or not must_count) else None


def _distrust(weights: Sequence[Tensor]) -> None:
    for weight in weights:
        if id(weight) not in _replayed:
            _replayed.add(id(weight))
            weakref.finalize(weight, _replayed.discard, id(weight)).atexit = False


def _finalizers(weights: Sequence[Tensor], key: tuple[Any, ...]) -> tuple[weakref.finalize[Any, Any], ...]:
    finalizers = tuple(weakref.finalize(weight, _kept.pop, key, None) for weight in weights)
    for finalizer in finalizers:
        finalizer.atexit = False
    return finalizers


def state_of(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what is another, by ==, once one of these weights has changed."""
    steps = _steps if any(weight.requires_grad for weight in weights) else None
    return (_changes, steps), *((None if w.is_inference() else w._version, *_place(w)) for w in weights)


def _place(weight: Tensor) -> tuple[Any, ...]:
    memory = weight.codes if isinstance(weight, FP8Tensor) else weight
    # The storage too: FSDP2 frees a weight's memory and keeps its storage, and another weight may get that address.
    storage = memory.untyped_storage()._cdata
    return memory.data_ptr(), storage, weight.shape, weight.stride(), weight.dtype, weight.device


def _records(weight: Tensor) -> bool:
    """Return whether a CUDA graph is being captured: it must quantise each time it is replayed."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _quantize(
    weights: Sequence[Tensor], read: Reading, target: Target, transposed: bool, kept: _Kept | None
) -> tuple[Quantized, Any]:
    """Return the stack, and where its rows lie if one launch quantises them: then in the memory of `kept`."""
    matrices = [read(weight) for weight in weights]
    copied = any(m.data_ptr() != w.data_ptr() for m, w in zip(matrices, weights, strict=True))  # gone by the next call
    if transposed or copied or not has_one_launch(matrices, target):
        return _quantize_one_by_one(matrices, target, transposed), None
    known = kept.rows if kept is not None and kept.places == [_place(w) for w in weights] else None
    return quantize_stack(matrices, target, None if kept is None else kept.stack, known)


def _quantize_one_by_one(weights: Sequence[Tensor], target: Target, transposed: bool) -> Quantized:
    tile_rows = target.tile.rows
    if len(weights) > 1 and not transposed and tile_rows and all(w.shape[0] % tile_rows == 0 for w in weights[:-1]):
        return joined([quantize_matrix(weight.detach(), target) for weight in weights])
    stack = weights[0].detach() if len(weights) == 1 else torch.cat(list(weights))
    return quantize_matrix(stack.t() if transposed else stack, target)


def quantize_matrix(x: Tensor, target: Target) -> Quantized:
    """Quantise a matrix (R, C) as `target` says.

    Stochastic rounding has a seed of its own in each call, from PyTorch's generator: a resumed run draws the same ones.
    """
    stochastic = target.rounding == "stochastic"
    seed = torch.randint(2**62, (), device=x.device) if stochastic else 0
    return kernels.quantize(x, *target, seed)


def fprop(x: Quantized, weights: Sequence[Tensor], target: Target, dtype: torch.dtype, accumulate: str) -> list[Tensor]:
    """Return x W_i^T for each weight (N_i, K), as (M, N_i) of `dtype`; the stack is quantised as `target` says.

    Args:
        x: (M, K).
    """
    outputs: list[Tensor] = torch.ops.octavo.fprop(
        x.codes, x.scale, x.granularity.name, list(weights), str(target), dtype, accumulate
    )
    return outputs


def dgrad(
    g: Quantized, weights: Sequence[Tensor], target: Target, source: Target | None, dtype: torch.dtype, accumulate: str
) -> Tensor:
    """Return G W for the stack W (N, K) of the weights, as (M, K) of `dtype`.

    Args:
        g: (M, N).
        target: how W^T (K, N) is quantised. Where it is folded, G already holds its scales.
        source: how fprop quantises W, if those codes, transposed, are the ones to use.
    """
    result: Tensor = torch.ops.octavo.dgrad(
        g.codes, g.scale, g.granularity.name, list(weights), str(target), str(source or ""), dtype, accumulate
    )
    return result


def weight_scale(weights: Sequence[Tensor], target: Target) -> Tensor:
    """Return the scales of the stack of weights as fprop quantises it, in a memory of their own."""
    scale: Tensor = torch.ops.octavo.weight_scale(list(weights), str(target))
    return scale


def transposed_weights(weights: Sequence[Tensor], target: Target, source: Target | None) -> Quantized:
    """Return the stack of weights as dgrad reads it, (K, N). Arguments are those of `dgrad`."""
    if source is None:
        return quantized_weights(weights, target, transposed=True)
    return transpose_codes(quantized_weights(weights, source), folded=target.tile == PER_COLUMN)


def _target(text: str) -> Target:
    target = target_of(text)
    assert target is not None
    return target


def _fprop(
    x: Tensor, x_scale: Tensor, x_granularity: str, weights: list[Tensor], target: str,
    dtype: torch.dtype, accumulate: str,
) -> list[Tensor]:  # fmt: skip
    left = Quantized(x, x_scale, granularity_named(x_granularity))
    stack, counts = quantized_weights(weights, _target(target)), [weight.shape[0] for weight in weights]
    parts = split_rows(stack, counts)
    if parts is None:  # a tile of scales straddles two weights
        return [y.contiguous() for y in kernels.gemm(left, stack, dtype, accumulate).split(counts, dim=1)]
    return [kernels.gemm(left, part, dtype, accumulate) for part in parts]


def split_rows(stack: Quantized, counts: list[int]) -> list[Quantized] | None:
    """Return the rows of each weight in a stack, views; None where tiles of scales do not end where they do."""
    height = stack.granularity.rows
    if len(counts) == 1 or height is None:
        scales = [stack.scale] * len(counts)
    elif any(count % height for count in counts[:-1]):
        return None
    else:
        scales = list(stack.scale.split([-(-count // height) for count in counts]))
    codes = stack.codes.split(counts)
    return [Quantized(c, s, stack.granularity) for c, s in zip(codes, scales, strict=True)]


def _dgrad(
    g: Tensor, g_scale: Tensor, g_granularity: str, weights: list[Tensor], target: str, source: str,
    dtype: torch.dtype, accumulate: str,
) -> Tensor:  # fmt: skip
    stack_KN = transposed_weights(weights, _target(target), target_of(source))
    return kernels.gemm(Quantized(g, g_scale, granularity_named(g_granularity)), stack_KN, dtype, accumulate)


def _weight_scale(weights: list[Tensor], target: str) -> Tensor:
    return quantized_weights(weights, _target(target)).scale.clone()


def _fprop_shape(
    x: Tensor, x_scale: Tensor, x_granularity: str, weights: list[Tensor], target: str,
    dtype: torch.dtype, accumulate: str,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape[0], weight.shape[0], dtype=dtype) for weight in weights]


def _dgrad_shape(
    g: Tensor, g_scale: Tensor, g_granularity: str, weights: list[Tensor], target: str, source: str,
    dtype: torch.dtype, accumulate: str,
) -> Tensor:  # fmt: skip
    return g.new_empty(g.shape[0], math.prod(weights[0].shape[1:]), dtype=dtype)


def _weight_scale_shape(weights: list[Tensor], target: str) -> Tensor:
    cols = math.prod(weights[0].shape[1:])
    shape = _target(target).tile.scale_shape(sum(weight.shape[0] for weight in weights), cols)
    return weights[0].new_empty(shape, dtype=torch.float32)


# What they keep from call to call must not lie in the memory of a graph that a compiler captures by itself.
define(
    "fprop(Tensor x, Tensor x_scale, str x_granularity, Tensor[] weights, str target, "
    "ScalarType dtype, str accumulate) -> Tensor[]",
    _fprop,
    _fprop_shape,
    torch.Tag.cudagraph_unsafe,
)
define(
    "dgrad(Tensor g, Tensor g_scale, str g_granularity, Tensor[] weights, str target, str source, "
    "ScalarType dtype, str accumulate) -> Tensor",
    _dgrad,
    _dgrad_shape,
    torch.Tag.cudagraph_unsafe,
)
define(
    "weight_scale(Tensor[] weights, str target) -> Tensor",
    _weight_scale,
    _weight_scale_shape,
    torch.Tag.cudagraph_unsafe,
)

implements(torch.ops.octavo.fprop.default)(own_codes.fprop)
implements(torch.ops.octavo.dgrad.default)(own_codes.dgrad)
implements(torch.ops.octavo.weight_scale.default)(own_codes.weight_scale)
