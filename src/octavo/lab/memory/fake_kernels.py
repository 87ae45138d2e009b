"""GPU kernels on fake tensors: replacements for those that cannot run there, and their workspace.

On fake tensors `F.scaled_dot_product_attention` is PyTorch's flash attention for the CPU. It saves what all fused
kernels save: the inputs, the output, and one number per row. Its workspace is taken to be cuDNN's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from octavo._util.autograd import first_order
from octavo.kernels import cross_entropy, norm, optimizer
from octavo.kernels.explain import gemm_kernel

Replacement = tuple[Any, str, Any]
"""(module of Octavo, name, function on fake tensors)."""


class FakeMode(FakeTensorMode):
    """The fake mode of one forecast."""

    def forget_outputs(self) -> None:
        """Drop the mode's weak references to fake tensors, for which PyTorch would refuse `Module.to`."""
        self.fake_tensor_converter.tensor_memo.clear()


class AsOnGpu(TorchFunctionMode):
    """Computes PyTorch functions on fake CPU tensors as CUDA's kernels do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.data_ptr:
            return _address(args[0])
        if func is Tensor.__deepcopy__:
            return _copy(*args)
        if func is F.rms_norm and TracingContext.try_get() is None:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def replacements() -> Iterator[Replacement]:
    """Yield the functions of Octavo that another one replaces on fake tensors, in every module that imported them."""
    yield from _everywhere(gemm_kernel, lambda *_: ("fake", {}))
    for kernel, fake in _IN_PLACE.items():
        yield from _everywhere(kernel, fake)


def clear_caches() -> None:
    """Empty the function caches of Octavo: answers for fake tensors do not hold for real ones, nor vice versa."""
    for module in [module for key, module in sys.modules.items() if key.startswith("octavo.")]:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _everywhere(function: Callable[..., Any], fake: Callable[..., Any]) -> list[Replacement]:
    name = function.__name__
    modules = [module for key, module in sys.modules.items() if key.startswith("octavo.")]
    return [(module, name, fake) for module in modules if vars(module).get(name) is function]


def _nothing(*_: Any, **__: Any) -> None:
    """Write nothing: fake tensors have no data."""


_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    optimizer.update: _nothing,
    optimizer.momentum: _nothing,
    optimizer.store_gradient: _nothing,
    optimizer.squares: lambda tensors, *_, **__: torch.empty(len(tensors), dtype=torch.float64),
    cross_entropy.cross_entropy_: lambda logits_MV, *_, **__: torch.empty(logits_MV.shape[0], dtype=torch.float32),
}
"""Kernels that are not operators, because they write where they read."""


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute as PyTorch's CUDA kernel does; on the CPU several operations keep their results instead."""
    if len(shape) != 1:
        return F.rms_norm(x, list(shape), weight, eps)
    y_MD: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps or 0.0)  # type: ignore[no-untyped-call]
    return y_MD.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        made = norm.normalise(x_MD, weight, None, eps)
        ctx.save_for_backward(x_MD, weight, made.rstd)
        ctx.set_materialize_grads(False)
        return made.y

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return None, None, None
        x_MD, weight, rstd = ctx.saved_tensors
        return *norm.normalise_backward(grad_outputs[0], x_MD, weight, None, None, rstd)[:2], None


def _copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor for `copy.deepcopy`: PyTorch would copy the mode that it belongs to as well."""
    if id(tensor) not in memo:
        values = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    found: Tensor = memo[id(tensor)]
    return found


def _address(tensor: Tensor) -> int:
    """Return an address that no other live tensor has; fake tensors have no memory."""
    address: int = tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return address


def workspace(operator: Any, arguments: Sequence[Any]) -> int:
    """Return the bytes that a backward of attention allocates temporarily on a GPU; 0 for all other operators.

    dQ and one number per row are accumulated in FP32. Where query heads share a key head, dK and dV are computed per
    query head, in their own dtype, and then summed. Source: cuDNN frontend, `CompositeSDPABackwardNode`.
    """
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        _, query, key, value = arguments[:4]
        return _cudnn_workspace(query, key, value)
    if operator is torch.ops.octavo.attention_backward.default:  # (B, T, H, E), and an output that it decodes first
        query, key, value = (x.transpose(1, 2) for x in arguments[1:4])
        return _cudnn_workspace(query, key, value) + int(query.numel() * query.element_size())
    return 0


def _cudnn_workspace(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes for q (..., H, T, E), k and v (..., G, S, E)."""
    sums = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
    shares = query.shape[-3] // key.shape[-3]
    repeated = (key.numel() + value.numel()) * key.element_size() * shares if shares > 1 else 0
    return int(sums + repeated)
