"""Codes that travel with a tensor, from the layer that computed it to the layer that reads it.

What was made of a tensor while it was written is pinned to that tensor object. Any other tensor, a view or a copy,
carries nothing, and neither does this one once it has been written to. In compiled code that is known while the code is
traced, and holds within one graph. There the result of an RMS norm carries the norm's input, which backward keeps
anyway: readers make their codes of that, forward and backward.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo._util.compiler import answer, ask_tracer, traced_version
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import Quantized

_NAME, _TRACED, _NORM_SOURCE = "_octavo_offer", "_octavo_traced", "_octavo_normed"


class AttachedCodes(NamedTuple):
    """The codes of one tensor, as they were when it had this version."""

    quantized: Quantized
    target: QuantSpec
    version: tuple[int, ...]
    """Of the tensor, as `_version` gives it."""
    owner: ReferenceType[Tensor] | None
    """The tensor; None in compiled code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # deep copies and files carry nothing; `torch.load` knows this type


class NormSource(NamedTuple):
    """What the result of an RMS norm was made of, in compiled code."""

    x: Tensor
    """(M, D), the input of the norm."""
    norm: tuple[Tensor, Tensor]
    """As `octavo.kernels.quantize_normed` takes it."""
    versions: tuple[int, int]
    """Of the result and of x."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def attach_codes(y: Tensor, quantized: Quantized, target: QuantSpec) -> None:
    """Pin to y (..., D) the codes (M, D) of the same values, M its leading dimensions, made for `target`."""
    if torch.compiler.is_compiling():
        setattr(y, _TRACED, AttachedCodes(quantized, target, _version(y), None))
    elif not y.is_inference():  # inference tensors count no versions
        setattr(y, _NAME, AttachedCodes(quantized, target, _version(y), ref(y)))


def _version(x: Tensor) -> tuple[int, ...]:
    """Return what changes when x is written to, or gets other memory. Compiled code knows no memory."""
    return (traced_version(x),) if torch.compiler.is_compiling() else (x._version, x.data_ptr())


def attach_norm_source(y: Tensor, x: Tensor, norm: tuple[Tensor, Tensor]) -> None:
    """Pin to y, in compiled code, the RMS norm that it is the result of: see `NormSource`."""
    setattr(y, _NORM_SOURCE, NormSource(x, norm, (traced_version(y), traced_version(x))))


def attached_norm_source(y: Tensor) -> NormSource | None:
    """Return what `attach_norm_source` pinned to y in this graph, or None, also once y or x has been written to."""
    normed: NormSource | None = getattr(y, _NORM_SOURCE, None) if torch.compiler.is_compiling() else None
    if normed is None or normed.versions != (traced_version(y), traced_version(normed.x)):
        return None
    return normed


def is_output_of_attention(x: Tensor) -> bool:
    """Return whether x lies in memory that PyTorch's attention has returned in this trace, and keeps for backward."""
    return ask_tracer(x, _find_attention) is True


def _find_attention(context: Any) -> None:
    memory = context.get_local("x").as_fake().untyped_storage()._cdata
    nodes = context.graph().find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    results = [node.meta["example_value"] for node in nodes]
    answer(any(y.requires_grad and y.untyped_storage()._cdata == memory for y in results))


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what codes can be pinned to whose values nobody has: NaN of that shape, in the memory of one element."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def is_placeholder(x: Tensor) -> bool:
    """Return whether x is what `placeholder` gave, or a view of it."""
    return x.numel() > 1 and not any(x.stride())


def attached_codes(x: Tensor, target: QuantSpec) -> Quantized | None:
    """Return the codes (M, D) pinned to x for this target, or None. They may be taken any number of times.

    As everywhere in PyTorch, writing through `x.data` goes unseen.
    """
    found = getattr(x, _TRACED if torch.compiler.is_compiling() else _NAME, None)
    if not isinstance(found, AttachedCodes) or found.target != target:
        return None
    is_owner = found.owner is None or found.owner() is x
    return found.quantized if is_owner and found.version == _version(x) else None
