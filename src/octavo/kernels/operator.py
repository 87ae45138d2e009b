"""How a kernel becomes a custom operator, `torch.ops.octavo.<name>`: one opaque call in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("octavo", "FRAGMENT")


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
