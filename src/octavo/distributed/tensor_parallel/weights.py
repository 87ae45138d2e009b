"""Weights of tensor-parallel layers: DTensors for optimizers and checkpoints, local shards for the layers.

A weight (N, K) is sharded by rows (column-parallel: each rank has some outputs) or by columns (row-parallel: each has
some inputs, and outputs are summed). The codes and scales of an FP8 weight are sharded unchanged: where columns are
sharded, each rank starts with the scale of the whole row, until its optimizer writes its own.

Inside the forward of the parallel module, the layers' parameters are local shards instead of DTensors, so that layers
and fused operations compute as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from octavo._util.autograd import first_order
from octavo.distributed.checkpoint import plain_values_hook
from octavo.distributed.tensor_parallel.tokens import all_reduce_sums
from octavo.errors import UnsupportedError
from octavo.tensor import FP8Tensor, columns_of, is_distributed, local, rows_of

REPLICATED = Replicate()


class Placed(NamedTuple):
    """Placement of a module's parameter on the mesh; the parameter may be None."""

    module: nn.Module
    name: str
    placement: Placement


def placements_of(layer: nn.Module, name: str, ranks: int, dim: int) -> list[Placed]:
    """Return the placements that shard the weight of a linear layer, and with `dim` 0 its bias.

    Args:
        dim: 0: by rows, column-parallel; 1: by columns, row-parallel.

    Raises:
        UnsupportedError: not a linear layer, or a size that the number of ranks does not divide.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, nn.Linear) or not isinstance(weight, Tensor):
        raise UnsupportedError(f"tensor parallel: {name} is {type(layer).__name__}: only linear layers are sharded.")
    if weight.shape[dim] % ranks:
        raise UnsupportedError(
            f"tensor parallel: {name}.weight {tuple(weight.shape)}: {weight.shape[dim]} "
            f"{('outputs', 'inputs')[dim]} cannot be divided by {ranks} ranks. Take a number of ranks that "
            "divides them, or leave the layer out."
        )
    return [Placed(layer, "weight", Shard(dim)), Placed(layer, "bias", Shard(0) if dim == 0 else REPLICATED)]


def all_replicated(module: nn.Module) -> list[Placed]:
    """Return the placements that replicate the parameters of a module, without those of modules inside."""
    return [Placed(module, name, REPLICATED) for name in module._parameters]


def check_placements(found: Iterable[Placed], mesh: DeviceMesh) -> None:
    """Check that parameters can be placed together.

    Raises:
        UnsupportedError: one is distributed already, or shared by modules that place it differently.
    """
    wanted: dict[nn.Parameter, Placement] = {}
    for module, name, placement in found:
        if (parameter := module._parameters[name]) is None:
            continue
        before = _placed_before(parameter)
        there = (mesh, (wanted.setdefault(parameter, placement),))
        there = there if before is None else (before.device_mesh, before.placements)
        if is_distributed(parameter) or there != (mesh, (placement,)):
            raise UnsupportedError(
                f"tensor parallel: {type(module).__name__}.{name} is placed as {there[1]} already, by a layer that"
                " shares it or an earlier call. Untie it, or call tensor parallel once, before shard."
            )


def distribute(found: Sequence[Placed], mesh: DeviceMesh) -> None:
    """Replace parameters by DTensors; a tied one by the same. All ranks have the same values before; nothing is sent.

    Raises:
        UnsupportedError: see `check_placements`; nothing is replaced.
    """
    check_placements(found, mesh)
    for module, name, placement in found:
        if (parameter := module._parameters[name]) is None:
            continue
        if (placed := _placed_before(parameter)) is None:
            placed = _placed(parameter, mesh, placement)
            parameter.placed = placed  # type: ignore[attr-defined]  # for modules that share it, also in later calls
        module._parameters[name] = placed
        if isinstance(local(placed), FP8Tensor):
            module.register_state_dict_post_hook(plain_values_hook)


def _placed_before(parameter: nn.Parameter) -> Any:
    """Return the DTensor that a parameter is, or that has replaced it in another module; None if there is none."""
    return parameter if is_distributed(parameter) else getattr(parameter, "placed", None)


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    values = parameter.detach()
    part = _part(values, placement.dim, mesh) if isinstance(placement, Shard) else values
    placed = DTensor.from_local(part, mesh, [placement], run_check=False, shape=values.shape, stride=values.stride())
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def _part(values: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return a copy of this rank's shard; for an FP8 weight with the scales of whole rows."""
    if not isinstance(values, FP8Tensor):
        return values.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    size, rank = values.shape[dim] // mesh.size(), mesh.get_local_rank()
    codes, scale, tile = (rows_of, columns_of)[dim](values.quantized, rank * size, (rank + 1) * size)
    return FP8Tensor(
        codes.clone(memory_format=torch.contiguous_format), scale.clone(), tile, values.dtype, values.scaling
    )


class LocalParameters:
    """Replaces DTensor parameters of some modules by local shards, during each forward of `around`.

    Where there is one around a block, those of the modules inside it find nothing left to replace: the block's
    parameters take one step of autograd together, and small gradients one all-reduce.

    Args:
        around: the module whose forward it is. FSDP2 gathers its weights before.
        modules: modules with the parameters, each with the kind of gradient of its replicated parameters.
    """

    def __init__(self, around: nn.Module, modules: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh) -> None:
        self._modules, self._mesh = modules, mesh
        self._held: list[tuple[nn.Module, str, Any]] = []
        around.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        _call_always(around, lambda *_: self._leave())

    def _enter(self) -> None:
        self._leave()  # an earlier forward may have ended without calling hooks
        for trained in (True, False):  # apart: in one step of autograd all would be taken to need a gradient
            held = [
                (module, name, parameter, gradient)
                for module, gradient in self._modules
                for name, parameter in module._parameters.items()
                if isinstance(parameter, DTensor) and parameter.requires_grad == trained
            ]
            if held:  # none are where a module around this one has replaced them
                _, _, parameters, kinds = zip(*held, strict=True)
                parts = _Locals.apply(kinds, self._mesh, *parameters)  # type: ignore[no-untyped-call]
                for (module, name, parameter, _), part in zip(held, parts, strict=True):
                    self._held.append((module, name, parameter))
                    module._parameters[name] = part

    def _leave(self) -> None:
        for module, name, parameter in self._held:
            module._parameters[name] = parameter
        self._held.clear()


def _call_always(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a forward hook that runs also after errors, under the same key in every module.

    PyTorch numbers hooks, and blocks share compiled code only if these numbers are equal.
    """
    number = module.register_forward_hook(hook, always_call=True).id
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        cast(dict[Any, Any], hooks)[LocalParameters.__name__] = hooks.pop(number)


SUMMED, SAME, ADDED_BY_ALL = "summed", "same", "added by all"
"""Gradient of a replicated parameter on each rank: of its own tokens only; complete; or complete, for a parameter (the
bias of a row-parallel layer) that each rank adds to a sum over the ranks, which it must enter once."""


class _Locals(torch.autograd.Function):
    """Local shards of parameters: one step of autograd for all of them."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        kinds, mesh, *parameters = arguments
        ctx.wholes = [(p.device_mesh, p.placements, p.shape, p.stride()) for p in parameters]
        replicated = [p.placements[-1] == REPLICATED for p in parameters]
        ctx.summed = [every and kind == SUMMED for every, kind in zip(replicated, kinds, strict=True)]
        ctx.group = mesh.get_group()
        ctx.set_materialize_grads(False)  # what nobody used has no gradient, unless ranks sum it
        parts = [local(parameter) for parameter in parameters]
        ctx.parts = [(part.shape, part.dtype, part.device) for part in parts]
        return tuple(
            part / mesh.size() if every and kind == ADDED_BY_ALL else part.detach()
            for part, every, kind in zip(parts, replicated, kinds, strict=True)
        )

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        summed = [i for i, is_summed in enumerate(ctx.summed) if is_summed]
        shares = [_or_zeros(grads[i], ctx.parts[i]) for i in summed]  # a rank without one takes part
        totals = dict(zip(summed, all_reduce_sums(shares, ctx.group), strict=True))
        found: list[Any] = []
        for i, (mesh, placements, shape, stride) in enumerate(ctx.wholes):
            part = totals.get(i, grads[i])
            whole = {"run_check": False, "shape": shape, "stride": stride}
            found.append(None if part is None else DTensor.from_local(part, mesh, placements, **whole))
        return None, None, *found


def _or_zeros(grad: Tensor | None, like: tuple[Any, ...]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
