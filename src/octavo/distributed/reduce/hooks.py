"""Reductions inside of PyTorch's DDP (as a communication hook) and FSDP2 (as its reduce-scatter).

Annotations are not postponed here: DDP inspects those of a hook.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from octavo.distributed.reduce import reduction
from octavo.distributed.reduce.scheme import Scheme
from octavo.errors import ConfigError, UnsupportedError


def set_reduction(model: nn.Module, scheme: str | Scheme, mesh: DeviceMesh | None = None) -> Scheme:
    """Reduce the gradients of a model with a scheme, from the next backward on.

    Args:
        model: a `DistributedDataParallel`, or a model to which `fully_shard` was applied. With a 2-D mesh FSDP2 itself
            sums over the replicas; the scheme applies to the ranks that share the shards.
        scheme: a name in `REDUCTIONS`, or a scheme.
        mesh: see `reduction`.

    Returns:
        The scheme. Its `state_dict` belongs in a checkpoint.

    Raises:
        ConfigError: the model is neither, or the scheme is unknown.
    """
    scheme = reduction(scheme, mesh) if isinstance(scheme, str) else scheme
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(Buckets(scheme, group, names), reduce_bucket)
        return scheme
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"set_reduction: {type(model).__name__} is neither a DistributedDataParallel nor sharded: wrap it, or call "
            "fully_shard(model), first."
        )
    for unit, name in _units(model).items():
        unit.set_custom_reduce_scatter(ShardReduction(scheme, name))  # type: ignore[arg-type]
    return scheme


def _units(model: nn.Module) -> dict[FSDPModule, str]:
    """Return FSDP2's gather units, each named by its first parameter, which is unique among the stages of a model."""
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    units: dict[FSDPModule, str] = {}
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        around = parameter
        while around and around not in sharded:
            around = around.rpartition(".")[0]
        if around in sharded:
            units.setdefault(sharded[around], parameter)
    return units


class Buckets(NamedTuple):
    """State of the communication hook of a DDP model."""

    scheme: Scheme
    group: dist.ProcessGroup
    names: dict[nn.Parameter, str]


def reduce_bucket(state: Buckets, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Reduce a bucket of gradients, on a GPU concurrently with backward: a communication hook of DDP."""
    gradient = bucket.buffer()
    parts = {state.names[p]: g.numel() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    if not gradient.is_cuda:
        state.scheme.all_reduce(gradient, state.group, parts=parts)
        return _done(gradient)
    stream = _side_stream(gradient.device)
    stream.wait_stream(torch.cuda.current_stream(gradient.device))
    with torch.cuda.stream(stream):
        state.scheme.all_reduce(gradient, state.group, parts=parts)
        return _done(gradient)  # waiting for the future waits for this stream


def _done(gradient: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[gradient.device] if gradient.is_cuda else None)
    future.set_result(gradient)
    return future


_side_stream = functools.cache(torch.cuda.Stream)
"""(device) -> one stream per device."""


class ShardReduction:
    """FSDP2's protocol `ReduceScatter`: all gradients of a unit form one flat tensor, with one name."""

    def __init__(self, scheme: Scheme, name: str) -> None:
        self.scheme = scheme
        self.name = name
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of that size. FSDP2 asks for the gradients first, then for their sum.

        Gradients are in the policy's `reduce_dtype`; their sum is always in FP32.
        """
        self._has_input = not self._has_input
        dtype = dtype if self._has_input else torch.promote_types(dtype, torch.float32)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce, on the current stream.

        Raises:
            UnsupportedError: the operation is neither a mean nor a sum, or it is asynchronous.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) or async_op:
            raise UnsupportedError(
                f"reduction '{self.scheme.name}' in FSDP2 supports means and sums on FSDP2's stream, got {op}: after "
                "set_gradient_divide_factor(...) also call set_force_sum_reduction_for_comms(True)."
            )
        self._has_input = False
        mean = op == dist.ReduceOp.AVG
        self.scheme.reduce_scatter(output_tensor, input_tensor, group, mean=mean, name=self.name)
