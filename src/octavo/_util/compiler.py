"""Annotations for PyTorch's compiler, and questions to it, which is imported only where they are asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

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
    version: int = ask_tracer(x, _find_version)
    return version


def ask_tracer(x: Tensor, find: Callable[[Any], None]) -> Any:
    """Return what `find` answers of x while Dynamo traces; where something else does, a number that no tensor has.

    Args:
        find: a function at module level that calls `answer`. It takes Dynamo's `ComptimeContext`, in which x is `x`.
    """
    from torch._dynamo.comptime import comptime

    comptime(find, _number_nothing)
    return _answer_found()


def answer(value: Any) -> None:
    """Give the answer to `ask_tracer`."""
    global _answer
    _answer = value


_answer: Any = 0
_serials = itertools.count(2)
_numbers: Any = WeakIdKeyDictionary()
"""Tensor of a trace -> its version when it was last asked for, and the number given for that."""


def _find_version(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    version, number = _numbers.get(fake, (None, 0))
    if version != fake._version:
        number = next(_serials)
        _numbers[fake] = fake._version, number
    answer(number)


def _number_nothing() -> None:
    answer(next(_serials))


@assume_constant_result
def _answer_found() -> Any:
    return _answer
