"""How a kernel becomes a custom operator, `torch.ops.octavo.<name>`: one opaque call in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_library = torch.library.Library("octavo", "FRAGMENT")
_made_of_kernels: dict[str, Callable[..., Any]] = {}


class Made(Protocol):
    """What a kernel made: a quantised matrix, or a batch of them."""

    @property
    def codes(self) -> Tensor: ...  # noqa: D102

    @property
    def scale(self) -> Tensor: ...  # noqa: D102


def define(signature: str, run: Callable[..., Any], shape: Callable[..., Any], *tags: torch.Tag) -> None:
    """Define an operator for every device.

    Args:
        signature: `name(arguments) -> results`, as PyTorch's operator schemas are written.
        run: what it does.
        shape: the same without data: returns results of the right shapes, dtypes and strides.
        tags: what to know of it beside that compilers may handle it.
    """
    name = signature.partition("(")[0]
    _library.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", shape, lib=_library)
    if not run.__module__.startswith("octavo.kernels"):
        _made_of_kernels[f"octavo::{name}"] = run


def composite(operator: Any) -> Callable[..., Any] | None:
    """Return what an operator does if it is made of several kernels, None for a kernel and for what is not ours."""
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else ""
    return _made_of_kernels.get(name)


def flat(*made: Made | None, like: Tensor) -> tuple[Tensor, ...]:
    """Return codes and scale of each, empty tensors for what was not made: operators return plain tensors."""
    return tuple(
        x for one in made for x in ((like.new_empty(0), like.new_empty(0)) if one is None else (one.codes, one.scale))
    )
