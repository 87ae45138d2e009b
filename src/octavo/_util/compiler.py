"""Annotations for PyTorch's compiler, and a question to it, without importing it."""

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
    """Return a number that is another one once the code being traced has written to x, or in another trace.

    A graph has no versions, but the tensors that Dynamo traces with do, and code that runs while it traces sees them.
    """
    from torch._dynamo.comptime import comptime

    comptime(_look_up, _give_up)
    return _version_found()


_serials = itertools.count(1)
_numbers: Any = WeakIdKeyDictionary()
"""Tensor of a trace -> its version when it was last asked for, and the number given for that."""
_found = 0


def _look_up(context: Any) -> None:
    global _found
    fake = context.get_local("x").as_fake()
    version, _found = _numbers.get(fake, (None, 0))
    if version != fake._version:
        _found = next(_serials)
        _numbers[fake] = fake._version, _found


def _give_up() -> None:
    """Give a number of its own: the code is traced by something else than Dynamo."""
    global _found
    _found = next(_serials)


@assume_constant_result
def _version_found() -> int:
    return _found
