"""What PyTorch's compiler is told of functions, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Let compilers run a function when they trace, and never again.

    As `torch.compiler.assume_constant_result` does: but that imports the compiler, which takes as long as all else of
    PyTorch, and many programs compile nothing.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
