"""The residual stream inside a block: a tensor, or a sum that is not computed yet.

    x = x + attention(norm(x))        the sum is written by the norm that follows it, in the pass that normalises it
    x = x + mlp(norm(x))

A `Stream` replaces a tensor in a block's own forward. Adding a tensor to it returns another stream, which keeps both
operands until something reads the sum: a norm of Octavo's, which adds and normalises in one pass, or anything else, for
which PyTorch adds them. The result is that of the code as written: computed in the autograd mode of the addition, from
operands that were not written to since. Operators, functions and attributes are the tensor's, so that other code gets
the same bits. It is not a `Tensor`: only code that checks the type sees a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.errors import UnsupportedError
from octavo.kernels.runtime.dispatch import is_plain

_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


class Stream:
    """A residual stream (..., D)."""

    __slots__ = ("_addend", "_state", "_x")

    def __init__(self, x: Tensor, addend: Tensor | None = None) -> None:
        self._x, self._addend = x, addend
        if addend is not None:
            self._state = _state(x, addend)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The tensors that it is the sum of; (tensor, None) if it was read, or is no sum of this autograd mode.

        Raises:
            UnsupportedError: one of them was written to after the sum.
        """
        if self._addend is not None and self._state != _state(self._x, self._addend):
            return self.tensor(), None
        return self._x, self._addend

    def set_value(self, x: Tensor) -> None:
        """Set its value: the computed sum, or the same value as another operation returned it."""
        self._x, self._addend = x, None

    def tensor(self) -> Tensor:
        """Return its value.

        Raises:
            UnsupportedError: as for `parts`.
        """
        if self._addend is not None:
            trains, infers, versions = self._state
            if versions != _state(self._x, self._addend)[2]:
                raise UnsupportedError(
                    f"a block wrote to a tensor {tuple(self._x.shape)} of its residual sum, in place, before a norm "
                    "computed the sum: let the block write to a copy, or convert without fuse='all'."
                )
            with torch.inference_mode(infers), torch.set_grad_enabled(trains):  # as where the sum was written
                self.set_value(self._x + self._addend)
        return self._x

    def plus(self, other: Any) -> Any:
        """Return the sum with a tensor of the same shape as a stream; that with anything else as PyTorch does."""
        x = self.tensor()
        return Stream(x, other) if isinstance(other, Tensor) and _is_alike(x, other) else x + materialize(other)

    __add__ = __radd__ = plus

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # of a tensor, not of a stream
        """Write to the tensor, as a tensor does."""
        x = self.tensor()
        x += materialize(other)
        return x

    def __getattr__(self, name: str) -> Any:
        if name in Stream.__slots__:  # looked up on a copy before it is set
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SUMS and len(args) == 2 and not kwargs:
            first, second = args  # one of them is a stream
            return first.plus(second) if isinstance(first, Stream) else second.plus(first)
        return func(*materialize(args), **materialize(dict(kwargs or {})))


def materialize(value: Any) -> Any:
    """Return a value whose streams, also those in tuples, lists and dictionaries, are tensors."""
    if isinstance(value, Stream):
        return value.tensor()
    return tree_map(lambda part: part.tensor() if isinstance(part, Stream) else part, value)


def _state(x: Tensor, addend: Tensor) -> tuple[bool, bool, tuple[int, int] | None]:
    """Return the autograd mode, and how often each was written to; None for tensors of inference mode."""
    versions = None if x.is_inference() or addend.is_inference() else (x._version, addend._version)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), versions


def _is_alike(x: Tensor, other: Tensor) -> bool:
    return is_plain(other) and other.shape == x.shape and other.device == x.device and other.is_floating_point()


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Stream, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*materialize(args))

    return method


_OPERATORS = (
    "sub", "rsub", "isub", "mul", "rmul", "imul", "matmul", "rmatmul", "truediv", "rtruediv", "itruediv", "floordiv",
    "rfloordiv", "pow", "rpow", "mod", "neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor",
    "invert", "bool", "float", "int", "len", "iter", "contains", "getitem", "setitem", "format", "repr", "array",
    "reduce_ex", "deepcopy",
)  # fmt: skip
"""What Python looks up in the class, and `__getattr__` does not see."""
for _name in _OPERATORS:
    setattr(Stream, f"__{_name}__", _forwarded(f"__{_name}__"))
setattr(Stream, "__hash__", lambda self: hash(self.tensor()))  # noqa: B010 - defining __eq__ has unset it
