"""Annotations for PyTorch's compiler, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Mark a function for evaluation at trace time only.

    Equivalent to `torch.compiler.assume_constant_result`, which would import the compiler. That doubles the import time
    of PyTorch, and many programs compile nothing.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
