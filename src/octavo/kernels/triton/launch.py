"""Launches of Triton kernels.

Triton's own launcher specialises, hashes and looks up each launch: tens of microseconds of host time, many times the
run time of a kernel on a small tensor. A `Kernel` caches the compiled kernel, by the properties that Triton specialises
on, and launches it directly. Traced launches go through `wrap_triton`, since compiled code launches kernels itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.runtime.dispatch import PLAIN
from octavo.kernels.runtime.host_state import has_launch_hooks
from octavo.kernels.runtime.tape import recorder_here

_UNTRACED = ("enable_fp_fusion", "maxnreg")
"""Triton options that tracing does not support. Traced kernels do not need them: none adds a product (FMA)."""


def as_laid_out(x: Tensor) -> Tensor:
    """Return x; under tracing, x with the strides of the trace enforced.

    Inductor otherwise chooses the strides itself, and where its choice is not a view, copies x for each kernel.
    """
    if type(x) in PLAIN:
        return x
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order(x, x.stride())  # type: ignore[no-any-return]


class Kernel:
    """A `triton.jit` function with Triton's syntax for launches: `kernel[grid](*arguments, **meta)`."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        params = getattr(function, "params", None)  # none in the interpreter
        self._is_constexpr = None if params is None else [param.is_constexpr for param in params]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the Triton function: `arg_names`, `params`, `src`."""
        if name == "function":  # looked up on a copy before it is set
            raise AttributeError(name)
        return getattr(self.function, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a callable that launches the kernel on this grid."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        like = arguments[0] if arguments else None
        if not isinstance(like, Tensor):
            like = next((x for x in arguments if isinstance(x, Tensor)), None)
        if like is None:
            self._launch_uncached(grid, arguments, meta, None)
            return
        if type(like) not in PLAIN:
            options = {name: value for name, value in meta.items() if name not in _UNTRACED}
            torch.library.wrap_triton(self.function)[grid](*arguments, **options)
            return
        key = self._key(like, arguments, meta)
        known = None if key is None else self._compiled.get(key)
        if known is None or has_launch_hooks():
            self._launch_uncached(grid, arguments, meta, key)
            return
        kernel, rest = known
        across, down, deep = (*grid, 1, 1)[:3]
        if (recorder := recorder_here()) is not None:
            recorder.launch(kernel, (across, down, deep), (*arguments, *rest))
        stream = torch._C._cuda_getCurrentRawStream(key[0])  # type: ignore[index]
        launch, function, metadata = kernel
        launch(across, down, deep, stream, function, metadata, None, None, None, *arguments, *rest)

    def _launch_uncached(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any], key: tuple[Any, ...] | None
    ) -> None:
        """Launch through Triton, and cache the compiled kernel."""
        if (recorder := recorder_here()) is not None:
            recorder.refuse()
        compiled = self.function[grid](*arguments, **meta)
        if key is not None and compiled is not None:
            kernel = compiled.run, compiled.function, compiled.packed_metadata
            rest = self.function.params[len(arguments) :]
            self._compiled[key] = kernel, tuple(meta.get(param.name, param.default) for param in rest)

    def _key(self, like: Tensor, arguments: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return the device and the properties that Triton specialises on; None for arguments of unknown types."""
        if self._is_constexpr is None:
            return None
        key: list[Any] = [like.get_device(), *meta.items()]
        addresses = 0
        for x, is_constexpr in zip(arguments, self._is_constexpr, strict=False):
            kind = type(x)
            if kind in PLAIN:
                key.append(x.dtype)
                addresses |= x.data_ptr()
            elif x is None or is_constexpr or kind is bool:
                key.append(x)
            elif kind is int:
                key.append(1 if x == 1 else -(x % 16 == 0) if -(2**31) <= x < 2**31 else x)
            elif kind is float:
                key.append(kind)
            elif kind.__name__ == "TensorDescriptor":
                key += (x.base.dtype, *x.block_shape)
            else:
                return None
        if addresses % 16:
            key += (x.data_ptr() % 16 for x in arguments if type(x) in PLAIN)
        return tuple(key)
