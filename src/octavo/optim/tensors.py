"""Parameters as the kernels read them: matrices of contiguous memory, in any order of dimensions.

For a sharded parameter, this rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.optimizer import Layout, Slot
from octavo.kernels.storage import GROUP
from octavo.optim.sharded import stream_of
from octavo.tensor import FP8Tensor, local

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(parameter: Tensor, where: str) -> None:
    """Check that the kernels can step this parameter.

    Raises:
        ConfigError: it is not FP32, BF16, FP16 or an E4M3 `FP8Tensor` with row-wise scales, or has gaps in memory; or
            it is an `FP8Tensor` that is not contiguous.
    """
    parameter = local(parameter)
    if isinstance(parameter, FP8Tensor):
        if parameter.codes.dtype != torch.float8_e4m3fn or parameter.granularity.name != "row":
            raise ConfigError(f"{where}: an FP8 weight must be E4M3 with row-wise scales, this is {parameter!r}.")
        for part, tensor in (("codes", parameter.codes), ("scale", parameter.scale)):
            if not tensor.is_contiguous():  # kernels read rows one after the other, and each row's scale
                raise ConfigError(f"{where}: its {part} of strides {tensor.stride()} must be contiguous.")
    elif parameter.dtype not in WEIGHT_DTYPES:
        known = ", ".join(map(str, WEIGHT_DTYPES))
        raise ConfigError(f"{where}: the dtype {parameter.dtype} is none of {known}.")
    elif not _memory_order(parameter)[1]:
        raise ConfigError(f"{where}: it has gaps in memory: pass a contiguous parameter.")


def stored_weight(parameter: Tensor) -> Tensor:
    """Return a weight as it is stored on this rank; for an FP8 weight, its codes."""
    parameter = local(parameter)
    return parameter.codes if isinstance(parameter, FP8Tensor) else parameter


def count_writes(parameters: Iterable[Tensor]) -> None:
    """Count a write to the weights by kernels, so that a backward that would read the old ones raises.

    For an FP8 weight both tensors count: eager layers save the weight, compiled ones its codes.
    """
    written = {id(x): x for parameter in parameters for x in (local(parameter), stored_weight(parameter))}
    torch.autograd.graph.increment_version(written.values())


def value_of(parameter: Tensor) -> Tensor:
    """Return the FP32 value of a weight, in its shape."""
    parameter = local(parameter)
    return parameter.dequantize(torch.float32) if isinstance(parameter, FP8Tensor) else parameter.detach().float()


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return rows and columns of a parameter as a matrix: columns are the last dimension, if a scale group fits in it.

    Otherwise, as for convolution kernels, they are all dimensions but the first.
    """
    parameter = local(parameter)
    order, _ = _memory_order(parameter)
    sizes = [parameter.shape[dim] for dim in order]
    if len(sizes) < 2:
        return 1, prod(sizes)
    if len(sizes) == 2 or sizes[-1] >= GROUP:
        return prod(sizes[:-1]), sizes[-1]
    return sizes[0], prod(sizes[1:])


def as_matrix(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor with the shape and strides of a parameter as a matrix, a view."""
    parameter = local(parameter)
    order, _ = _memory_order(parameter)
    return tensor.permute(order).reshape(matrix_shape(parameter))


def like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros with the shape and strides of a parameter."""
    zeros: Tensor = torch.zeros_like(stored_weight(parameter), dtype=dtype, memory_format=torch.preserve_format)
    return zeros


def like_state(name: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor) -> Tensor:
    """Return zeros for a state tensor of a parameter: with its strides, unless they are scales or the step."""
    if name == "step" or name.endswith("_scale"):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    return like(parameter, dtype)


def gradient_of(parameter: Tensor, name: str) -> Tensor:
    """Return a parameter's gradient as a matrix, copied only where its strides differ from the parameter's.

    Raises:
        UnsupportedError: it is sparse, or not FP32, BF16 or FP16.
    """
    assert parameter.grad is not None
    gradient, parameter = local(parameter.grad), local(parameter)
    if gradient.layout != torch.strided or gradient.dtype not in WEIGHT_DTYPES:
        raise UnsupportedError(
            f"optimizer: parameter '{name}': gradients must be dense FP32, BF16 or FP16, this one is {gradient.layout},"
            f" {gradient.dtype}."
        )
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient if gradient.dim() == 2 else gradient.detach().view(matrix_shape(parameter))
    if gradient.stride() != parameter.stride():
        gradient = like(parameter, gradient.dtype).copy_(gradient)
    return as_matrix(gradient.detach(), parameter)


def slot_of(
    row: int, number: int, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], layout: Layout
) -> Slot:
    """Return the kernel arguments of a parameter, its gradient (without scales) and its state."""

    def found(name: str) -> Tensor | None:
        return as_matrix(state[name], parameter) if name in state else None

    stream, parameter = stream_of(number, parameter), local(parameter)
    return Slot(
        row=row,
        number=stream,
        weight=as_matrix(stored_weight(parameter).detach(), parameter),
        weight_scale=parameter.scale if isinstance(parameter, FP8Tensor) else None,
        gradient=gradient,
        master=found("remainder" if layout.remainder_bits else "master"),
        master_scale=state.get("master_scale"),
        first=found("exp_avg"),
        first_scale=state.get("exp_avg_scale"),
        second=found("exp_avg_sq"),
        second_scale=state.get("exp_avg_sq_scale"),
    )


def _memory_order(tensor: Tensor) -> tuple[list[int], bool]:
    """Return the dimensions from the outermost in memory to the innermost, and whether they fill it without gaps."""
    if tensor.is_contiguous():
        return list(range(tensor.dim())), True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return order, False
        expected *= tensor.shape[dim]
    return order, True
