"""What runs in place of what cannot run on paper: compilers, kernels that write in place, CUDA's own operations."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from octavo.kernels import cross_entropy, norm, optimizer
from octavo.kernels.explain import gemm_kernel

Patch = tuple[Any, str, Any]
"""(where, name, what it is on paper)."""


def stand_ins(compile_fx: Callable[..., Any]) -> Iterator[Patch]:
    """Return what is another on paper.

    Args:
        compile_fx: in place of Inductor.
    """
    from torch._inductor import compile_fx as inductor

    yield inductor, "compile_fx", compile_fx
    yield nn.RMSNorm, "forward", _rms_norm
    yield FakeTensor, "data_ptr", _address
    yield FakeTensor, "__deepcopy__", _copy
    yield weakref, "getweakrefs", lambda tensor: []  # PyTorch watches fakes, and would not let them be moved for that
    yield from _everywhere(gemm_kernel, lambda *_: ("on paper", {}))
    for kernel, stand_in in _IN_PLACE.items():
        yield from _everywhere(kernel, stand_in)


def forget_answers() -> None:
    """Empty the caches of this package: what fakes answered must not be believed of real tensors, nor vice versa."""
    for module in [module for key, module in sys.modules.items() if key.startswith("octavo.")]:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _everywhere(function: Callable[..., Any], stand_in: Callable[..., Any]) -> list[Patch]:
    """Return a patch for each module of this package that has the function under its name."""
    name = function.__name__
    modules = [module for key, module in sys.modules.items() if key.startswith("octavo.")]
    return [(module, name, stand_in) for module in modules if vars(module).get(name) is function]


def _nothing(*_: Any, **__: Any) -> None:
    """Write where nothing lies."""


def _squares(tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64)


def _cross_entropy(logits_MV: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty(logits_MV.shape[0], dtype=torch.float32)


_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    optimizer.update: _nothing,
    optimizer.momentum: _nothing,
    optimizer.store_gradient: _nothing,
    optimizer.squares: _squares,
    cross_entropy.cross_entropy_: _cross_entropy,
}
"""Kernels that are no operators, because they write where they read."""

_forward_of_torch = nn.RMSNorm.forward


def _rms_norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
    """Do as PyTorch's kernel for CUDA does. On the CPU it has several operations that keep their results instead."""
    if torch.compiler.is_compiling() or len(self.normalized_shape) != 1:
        return _forward_of_torch(self, x)
    y_MD: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), self.weight, self.eps or 0.0)  # type: ignore[no-untyped-call]
    return y_MD.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        made = norm.rms_norm(x_MD, weight, eps)
        ctx.save_for_backward(x_MD, weight, made.rstd)
        assert made.y is not None
        return made.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, weight, rstd = ctx.saved_tensors
        return *norm.rms_norm_backward(grad_outputs[0], x_MD, weight, rstd), None


def _copy(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake for `copy.deepcopy`: PyTorch copies the mode that it belongs to as well."""
    if id(tensor) not in memo:
        values = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    found: Tensor = memo[id(tensor)]
    return found


def _address(tensor: Tensor) -> int:
    """Return an address that no other tensor alive has: fakes have none."""
    address: int = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return address
