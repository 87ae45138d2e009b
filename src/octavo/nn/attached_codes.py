"""Codes attached to a tensor by the operation that computed it, for the layer that reads it.

They belong to one tensor object. Other tensors, such as views and copies, have none. After a write to its memory, by
whatever means, the codes are not used: the tensor is sealed (`octavo.nn.seal`), which costs nothing on the GPU. A
layer's own kernels break the seal by reading, so `renew` seals the tensor again after them; then the next layer finds
the codes, too.

In compiled code writes are known at trace time, within one graph. There the result of an RMS norm refers to the norm's
input, which backward saves anyway: readers make their codes from that, forward and backward.
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
from octavo.nn.seal import Seal
from octavo.numerics import Quantized
from octavo.recipes import Recipe

_NAME, _TRACED = "_octavo_offer", "_octavo_traced"


class AttachedCodes(NamedTuple):
    """Codes of one tensor with the values that it had."""

    made: tuple[tuple[Quantized, QuantSpec], ...]
    """Each set of codes, with its target."""
    unwritten: Seal | int
    """Proof that it still has them; in compiled code its version (`traced_version`)."""
    owner: ReferenceType[Tensor] | None
    """The tensor; None in compiled code."""

    def made_for(self, target: QuantSpec) -> Quantized | None:
        """Return the codes of a target, None if there are none."""
        for quantized, spec in self.made:
            if spec == target:
                return quantized
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # nothing in deep copies and files; `torch.load` accepts this type


class NormSource(NamedTuple):
    """The RMS norm that a tensor is the result of, in compiled code."""

    x: Tensor
    """(M, D), the input of the norm."""
    norm: tuple[Tensor, Tensor]
    """As for `octavo.kernels.quantize_normed`."""
    versions: tuple[int, int]
    """Versions of the result and of x."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


class InputCodes(NamedTuple):
    """Codes of the input (M, K) of a layer that the kernel which computed it has made too."""

    fprop: Quantized
    second: Quantized | None = None
    """Those that wgrad reads, if they are others (`LinearPlan.x_second`)."""


def attach_codes(y: Tensor, *made: tuple[Quantized, QuantSpec]) -> None:
    """Attach to y (..., D) codes (M, D) of its values, M its leading dimensions, and the target of each set.

    Nobody else may have a pointer to the memory of y yet (`octavo.nn.seal`). If it cannot be sealed, y has no codes.
    """
    if torch.compiler.is_compiling():
        setattr(y, _TRACED, AttachedCodes(made, traced_version(y), None))
    elif (seal := Seal.of(y)) is not None:
        setattr(y, _NAME, AttachedCodes(made, seal, ref(y)))


def renew(x: Tensor) -> None:
    """Seal x again after kernels of a layer have read it, which `attached_codes` gave its codes just before."""
    attached = None if torch.compiler.is_compiling() else getattr(x, _NAME, None)
    if isinstance(attached, AttachedCodes):
        attach_codes(x, *attached.made)


def pass_on(x: Tensor, y: Tensor) -> None:
    """Attach the codes of x to y, which has the same values."""
    if (attached := _attached(x)) is not None:
        attach_codes(y, *attached.made)


def attach_norm_source(y: Tensor, x: Tensor, norm: tuple[Tensor, Tensor]) -> None:
    """Attach to y, in compiled code, the RMS norm that it is the result of: see `NormSource`."""
    setattr(y, _TRACED, NormSource(x, norm, (traced_version(y), traced_version(x))))


def has_traced_source(x: Tensor) -> bool:
    """Return whether compiled code has attached to x its codes, or the norm that it is the result of."""
    return getattr(x, _TRACED, None) is not None


def attached_norm_source(y: Tensor) -> NormSource | None:
    """Return what `attach_norm_source` attached to y in this graph; None if y or x has been written to since."""
    normed = getattr(y, _TRACED, None) if torch.compiler.is_compiling() else None
    if not isinstance(normed, NormSource) or normed.versions != (traced_version(y), traced_version(normed.x)):
        return None
    return normed


def is_output_of_attention(x: Tensor) -> bool:
    """Return whether x is in memory that PyTorch's attention returned in this trace, and saves for backward."""
    return ask_tracer(x, _find_attention, None) is True


def _find_attention(context: Any) -> None:
    answer(is_made_by_attention(context, context.get_local("x").as_fake()))


def is_made_by_attention(context: Any, fake: Tensor) -> bool:
    """Return `is_output_of_attention` of a tensor that Dynamo traces with; for functions that `ask_tracer` calls."""
    memory = fake.untyped_storage()._cdata
    nodes = context.graph().find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    results = [node.meta["example_value"] for node in nodes]
    return any(y.requires_grad and y.untyped_storage()._cdata == memory for y in results)


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor to attach codes to if there are no values: NaN of that shape, in the memory of one element."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def is_placeholder(x: Tensor) -> bool:
    """Return whether x is a result of `placeholder`, or a view of one."""
    return x.numel() > 1 and not any(x.stride())


def attached_codes(x: Tensor, target: QuantSpec) -> Quantized | None:
    """Return the codes (M, D) of a target that are attached to x; None if x may have been written to since."""
    attached = _attached(x)
    return None if attached is None else attached.made_for(target)


def attached_input(x: Tensor, recipe: Recipe) -> InputCodes | None:
    """Return the codes attached to x that a layer reads; None if fprop's are not there, or as for `attached_codes`."""
    attached, plan = _attached(x), recipe.plan
    fprop = None if attached is None or plan.x is None else attached.made_for(plan.x)
    if attached is None or fprop is None:
        return None
    return InputCodes(fprop, None if plan.x_second is None else attached.made_for(plan.x_second))


def _attached(x: Tensor) -> AttachedCodes | None:
    """Return what is attached to x, if x is the tensor that the codes are of, and is as it was."""
    attached = getattr(x, _TRACED if torch.compiler.is_compiling() else _NAME, None)
    if not isinstance(attached, AttachedCodes):
        return None
    if isinstance(attached.unwritten, Seal):
        is_valid = attached.owner is not None and attached.owner() is x and attached.unwritten.holds(x)
    else:
        is_valid = attached.unwritten == traced_version(x)
    return attached if is_valid else None
