"""Launches of Triton kernels.

Triton's own launcher specialises, hashes and looks up each launch: tens of microseconds of host time, many times what a
kernel takes on a small tensor. A `Kernel` keeps what Triton compiled, by the properties that Triton specialises on, and
launches it directly. Compiled code launches kernels itself: a tracer gets the kernel wrapped by `wrap_triton`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_UNTRACED = ("enable_fp_fusion", "maxnreg")
"""Options of Triton that a tracer does not know. Kernels that are traced do not need them: none adds a product."""


class Kernel:
    """A `triton.jit` function to launch from the host, as Triton has it: `kernel[grid](*arguments, **meta)`."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        params = getattr(function, "params", None)  # none in the interpreter
        self._is_constexpr = None if params is None else [param.is_constexpr for param in params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches as many programs."""
        return lambda *arguments, **meta: self._launch(grid, arguments, meta)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any]) -> None:
        like = next(x for x in arguments if isinstance(x, Tensor))
        if type(like) not in _PLAIN:
            options = {name: value for name, value in meta.items() if name not in _UNTRACED}
            torch.library.wrap_triton(self.function)[grid](*arguments, **options)
            return
        key = self._key(like, arguments, meta)
        if key is None:
            self.function[grid](*arguments, **meta)
            return
        known = self._compiled.get(key)
        if known is None:
            compiled = self.function[grid](*arguments, **meta)
            if compiled is not None:
                rest = self.function.params[len(arguments) :]
                self._compiled[key] = compiled, tuple(meta.get(p.name, p.default) for p in rest)
            return
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)

    def _key(self, like: Tensor, arguments: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return what Triton specialises on; None where that is more than is looked at here."""
        if self._is_constexpr is None:
            return None
        key: list[Any] = [like.get_device()]
        for x, is_constexpr in zip(arguments, self._is_constexpr, strict=False):
            kind = type(x)
            if is_constexpr:
                key.append(x)
            elif kind is Tensor or kind is torch.nn.Parameter:
                key.append(x.dtype)
                key.append(x.data_ptr() % 16 == 0)
            elif kind is int:
                key.append(1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31))
            elif x is None or kind is bool:
                key.append(x)
            else:
                return None
        for name, value in meta.items():
            if isinstance(value, Tensor):
                return None
            key.append((name, value))
        return tuple(key)
