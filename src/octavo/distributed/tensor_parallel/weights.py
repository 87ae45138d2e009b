"""Weights of tensor parallel layers: DTensors to optimizers and checkpoints, this rank's part to the layers.

A weight (N, K) is cut by its rows (column-parallel: each rank has some outputs) or by its columns (row-parallel: each
has some inputs, and outputs are summed). An FP8 weight is cut as it is, codes and scales: of a row whose columns are
cut each rank has the scale of all of it, until its optimizer steps and writes one of its own.

Inside a forward of the module that holds the layers their parameters are this rank's parts, no DTensors: so layers, and
what is fused of them, compute on them as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from octavo.distributed.tensor_parallel.tokens import summed
from octavo.distributed.values import leave_values
from octavo.errors import UnsupportedError
from octavo.tensor import FP8Tensor, columns_of, is_distributed, local, rows_of

REPLICATED = Replicate()


def cut(layer: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Cut the weight of a linear layer over the ranks of a mesh, in place, and its bias where it is one of outputs.

    Args:
        dim: 0: by rows, column-parallel; 1: by columns, row-parallel.

    Raises:
        UnsupportedError: no linear layer, or sizes that the ranks do not divide.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
        raise UnsupportedError(f"tensor parallel: {name} is {type(layer).__name__}: only linear layers are cut.")
    if weight.shape[dim] % mesh.size():
        raise UnsupportedError(
            f"tensor parallel: {name}.weight {tuple(weight.shape)}: {weight.shape[dim]} "
            f"{('outputs', 'inputs')[dim]} cannot be cut for {mesh.size()} ranks. Take a number of ranks that divides "
            "them, or leave the layer out."
        )
    place(layer, "weight", mesh, Shard(dim))
    if layer.bias is not None:
        place(layer, "bias", mesh, Shard(0) if dim == 0 else REPLICATED)


def place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter a DTensor; every rank has the same values before. Nothing is sent."""
    parameter = module._parameters[name]
    if parameter is None or is_distributed(parameter):
        return
    values = parameter.detach()
    part = _part(values, placement.dim, mesh) if isinstance(placement, Shard) else values
    placed = DTensor.from_local(part, mesh, [placement], run_check=False, shape=values.shape, stride=values.stride())
    module._parameters[name] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    if isinstance(values, FP8Tensor):
        module.register_state_dict_post_hook(leave_values)


def _part(values: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part in memory of its own: the same bits, and of an FP8 weight the scales of whole rows."""
    if not isinstance(values, FP8Tensor):
        return values.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    size, rank = values.shape[dim] // mesh.size(), mesh.get_local_rank()
    codes, scale, tile = (rows_of, columns_of)[dim](values.quantized, rank * size, (rank + 1) * size)
    return FP8Tensor(
        codes.clone(memory_format=torch.contiguous_format), scale.clone(), tile, values.dtype, values.scaling
    )


class LocalParameters:
    """Lets some modules see this rank's parts of their own parameters, while a forward of `around` runs.

    Args:
        around: the module whose forward it is; where FSDP2 gathers the weights, it gathers them before.
        modules: those with the parameters, each with how the gradient of what is on all ranks comes about.
    """

    def __init__(self, around: nn.Module, modules: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self._modules, self._mesh = modules, mesh
        self._held: list[tuple[nn.Module, str, Any]] = []
        around.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        _call_always(around, lambda *_: self._leave())

    def _enter(self) -> None:
        self._leave()  # a forward before may have ended where hooks are not called
        for module, gradient in self._modules:
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self._held.append((module, name, parameter))
                    module._parameters[name] = _Local.apply(parameter, gradient, self._mesh)

    def _leave(self) -> None:
        for module, name, parameter in self._held:
            module._parameters[name] = parameter
        self._held.clear()


def _call_always(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward hook that errors do not stop, under the same key in every module.

    PyTorch numbers hooks, and compiled code of one block does for another only if this number is the same.
    """
    number = module.register_forward_hook(hook, always_call=True).id
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        cast(dict[Any, Any], hooks)[LocalParameters.__name__] = hooks.pop(number)


SUMMED, SAME, ADDED_BY_ALL = "summed", "same", "added by all"
"""Of a parameter that all ranks have, each rank's gradient is of its own tokens; or is the whole one; or it is added on
each rank to a sum that is then taken over the ranks, which it must enter once."""


class _Local(torch.autograd.Function):
    """This rank's part of a parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, gradient: str, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        ctx.group = mesh.get_group() if gradient == SUMMED and parameter.placements[-1] == REPLICATED else None
        part = local(parameter)
        by_all = gradient == ADDED_BY_ALL and parameter.placements[-1] == REPLICATED
        return part / mesh.size() if by_all else part.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0] if ctx.group is None else summed(grads[0], ctx.group)
        return (
            DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride),
            None,
            None,
        )
