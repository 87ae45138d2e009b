"""Annotations for PyTorch's compiler, and questions to it, which is imported only where they are asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Mark a function for evaluation at trace time only.

    Equivalent to `torch.compiler.assume_constant_result`, which would import the compiler. That doubles the import time
    of PyTorch, and many programs compile nothing.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def traced_version(x: Tensor) -> int:
    """Return a version of x, which changes when traced code writes to it; no two traces share one.

    A graph has no versions, but the tensors that Dynamo traces with do, and code that runs while it traces sees them.
    """
    from torch._dynamo.comptime import comptime

    comptime(_find_version, _number_nothing)
    return _answer_found()


def is_output_of_attention(x: Tensor) -> bool:
    """Return whether x lies in memory that PyTorch's attention has returned in this trace, and keeps for backward."""
    from torch._dynamo.comptime import comptime

    comptime(_find_attention, _number_nothing)
    return _answer_found() is True


_answer: bool | int = 0
_serials = itertools.count(2)
_numbers: Any = WeakIdKeyDictionary()
"""Tensor of a trace -> its version when it was last asked for, and the number given for that."""


def _find_version(context: Any) -> None:
    global _answer
    fake = context.get_local("x").as_fake()
    version, _answer = _numbers.get(fake, (None, 0))
    if version != fake._version:
        _answer = next(_serials)
        _numbers[fake] = fake._version, _answer


def _find_attention(context: Any) -> None:
    global _answer
    memory = context.get_local("x").as_fake().untyped_storage()._cdata
    nodes = context.graph().find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    results = [node.meta["example_value"] for node in nodes]
    _answer = any(y.requires_grad and y.untyped_storage()._cdata == memory for y in results)


def _number_nothing() -> None:
    """Answer where something else than Dynamo traces: a number that no tensor has."""
    global _answer
    _answer = next(_serials)


@assume_constant_result
def _answer_found() -> bool | int:
    return _answer
