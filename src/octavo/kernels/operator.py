"""Kernels as custom operators, `torch.ops.octavo.<name>`.

Eager code on plain tensors calls a kernel's function directly. The operator serves what looks at tensors through the
dispatcher: `torch.compile`, fake tensors, tensor subclasses, dispatch modes. An operator that is `in_graph` is
decomposed by AOTAutograd: the compiler sees Triton launches and the vendor's GEMMs, and launches them itself. All
others, and every operator while a ledger is open, are one opaque call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels import ledger
from octavo.kernels.dispatch import PLAIN

_library = torch.library.Library("octavo", "FRAGMENT")
_made_of_kernels: dict[str, Callable[..., Any]] = {}


class Made(Protocol):
    """A quantised matrix, or a batch of them."""

    @property
    def codes(self) -> Tensor: ...  # noqa: D102

    @property
    def scale(self) -> Tensor: ...  # noqa: D102


def define(
    signature: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    *tags: torch.Tag,
    in_graph: Callable[..., bool] | None = None,
) -> None:
    """Define an operator for every device.

    Args:
        signature: `name(arguments) -> results`, as PyTorch's operator schemas are written.
        run: computes it.
        shape: the same without data: returns results of the right shapes, dtypes and strides.
        tags: facts for compilers, in addition to `pt2_compliant_tag`.
        in_graph: takes the arguments of `run`; returns whether `run` consists of Triton launches and PyTorch's own
            operators only, so that a compiler may look inside.
    """
    name = signature.partition("(")[0]
    _library.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", shape, lib=_library)
    if in_graph is not None:
        _decompose(name, run, in_graph)
    if not run.__module__.startswith("octavo.kernels"):
        _made_of_kernels[f"octavo::{name}"] = run


def _decompose(name: str, run: Callable[..., Any], in_graph: Callable[..., bool]) -> None:
    """Let AOTAutograd trace `run` in place of the operator: what `torch.library.triton_op` does, with a condition."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ledger.is_open() or not in_graph(*args, **(kwargs or {})):
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        with mode:
            return run(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(f"octavo::{name}", FunctionalTensorMode, trace, lib=_library)


def is_direct(x: Tensor) -> bool:
    """Return whether to call a kernel's function itself: eager code on a plain tensor."""
    if torch.compiler.is_compiling():
        ledger.is_open()  # read here, so that compiled code is specialised on it
        return False
    return type(x) in PLAIN


def composite(operator: Any) -> Callable[..., Any] | None:
    """Return the function of an operator that calls several kernels; None for a kernel and for other operators."""
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else ""
    return _made_of_kernels.get(name)


def flat(*made: Made | None, like: Tensor) -> tuple[Tensor, ...]:
    """Return codes and scale of each, empty tensors for None: operators return plain tensors."""
    return tuple(
        x for one in made for x in ((like.new_empty(0), like.new_empty(0)) if one is None else (one.codes, one.scale))
    )
