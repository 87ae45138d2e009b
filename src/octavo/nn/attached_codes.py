"""Codes that travel with a tensor, from the layer that computed it to the layer that reads it.

Eager mode only: what was made of a tensor while it was written is pinned to that tensor object. Any other tensor, a
view or a copy, carries nothing, and neither does this one once it has been written to. In compiled code a tensor may
carry instead that it is kept for backward anyway: then its reader quantises it again there, and keeps no codes of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import Quantized

_NAME, _KEPT = "_octavo_offer", "_octavo_kept"


@dataclass(frozen=True)
class AttachedCodes:
    """The codes of one tensor, as they were when it had this version and this memory."""

    owner: ReferenceType[Tensor]
    quantized: Quantized
    target: QuantSpec
    version: int
    address: int

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # deep copies and files carry nothing; `torch.load` knows this type


def attach_codes(y: Tensor, quantized: Quantized, target: QuantSpec) -> None:
    """Pin to y (..., D) the codes (M, D) of the same values, M its leading dimensions, made for `target`."""
    if not (torch.compiler.is_compiling() or y.is_inference()):  # inference tensors count no versions
        setattr(y, _NAME, AttachedCodes(ref(y), quantized, target, y._version, y.data_ptr()))


def mark_kept(y: Tensor) -> None:
    """Note on y, in compiled code, that the layer that computed it keeps it for backward."""
    setattr(y, _KEPT, True)


def is_kept(x: Tensor) -> bool:
    """Return whether the layer that computed x keeps it for backward, in compiled code."""
    return torch.compiler.is_compiling() and getattr(x, _KEPT, False)


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
    if torch.compiler.is_compiling():
        return None
    pinned = getattr(x, _NAME, None)
    if not isinstance(pinned, AttachedCodes) or pinned.owner() is not x or pinned.target != target:
        return None
    unchanged = (pinned.version, pinned.address) == (x._version, x.data_ptr())
    return pinned.quantized if unchanged else None
