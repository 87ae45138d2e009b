"""`shard`: `fully_shard` of PyTorch over a converted model, whose weights then travel as FP8 codes.

FSDP2 does all of it: this file makes the weights what FSDP2 gathers in FP8 (`weights`), calls `fully_shard` for each
block and for the model, and sees to it that a state dict knows nothing of FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from octavo.conversion.policy import blocks_of
from octavo.distributed.reduce.hooks import set_reduction
from octavo.distributed.reduce.scheme import Scheme
from octavo.distributed.sharding.embedding import send_rows
from octavo.distributed.sharding.gathering import (
    ShardPlan,
    Use,
    gather_plan,
    is_fp8_weight,
    rows_plan,
    target_or_reason,
    uses_of,
)
from octavo.distributed.sharding.together import RowStacks, TensorScales
from octavo.distributed.sharding.weights import Gather, WeightShard, weights_changed
from octavo.distributed.values import leave_values, placed_as
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import Target
from octavo.nn import Linear
from octavo.nn.fused import FusedMLP
from octavo.tensor import FP8Tensor, local

BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
"""Parameters are gathered in BF16 where they are not in FP8, gradients are summed in FP32. Inputs stay what they are: a
table of rotary positions in BF16 would round positions."""
BF16_GRADIENTS_POLICY = replace(BF16_POLICY, reduce_dtype=torch.bfloat16)
"""The same for `reduce`: its schemes get gradients as they were computed, in BF16, and sum them in FP32 all the same.
Not for backward passes that leave the reduction to a later one (`set_requires_gradient_sync`, pipelines): till then
gradients would be summed in BF16."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = BF16_POLICY,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    reduce: str | Scheme | None = None,
    by_rows: Sequence[nn.Embedding] = (),
) -> ShardPlan:
    """Shard a model over the ranks of a mesh, in place: each block by `fully_shard`, and then the model.

    Call it after `octavo.convert` and before the optimizer is made, as `fully_shard`. Weights of layers that run in FP8
    are gathered as codes and scales where their recipe lets them: made of the shard, once an optimizer step, equal to
    the bit to those of the whole weight. All other parameters are gathered as FSDP2 does it.

    Args:
        mesh: of one dimension; or of two with names, the first replicated and the second sharded (HSDP). By default
            all ranks.
        blocks: what is gathered at a time, in the order in which they compute: the weights of one are gathered while
            the one before it does. By default the children of the `nn.ModuleList` with the most parameters.
        reshard_after_forward: as for `fully_shard`; not a number.
        mp_policy: `BF16_POLICY` by default; `BF16_GRADIENTS_POLICY` moves fewer bytes where `reduce` is given.
        offload_policy: as for `fully_shard`.
        ignored_params: as for `fully_shard`.
        reduce: how gradients are summed over the ranks that share the shards, as for `set_reduction`; by default by the
            reduce-scatter of FSDP2, in the policy's `reduce_dtype`.
        by_rows: embeddings that are not gathered: see `embedding`. Worth it where a rank has fewer tokens than they
            have rows. Nothing else may read their weights. Their gradients are means in FP32, whatever `reduce` says.

    Returns:
        How each parameter is gathered.

    Raises:
        ConfigError: no process group, or a block or an embedding that is not one of the model's modules.
        UnsupportedError: layers that are computed together are in different blocks, the model is sharded already, or
            `reshard_after_forward` is a number; or an embedding does more than look up rows, is read by others too, or
            is to be offloaded.
    """
    mesh = _all_ranks() if mesh is None else mesh
    parts = _blocks(model, blocks)
    _check(model, parts, reshard_after_forward)
    embeddings = _weights(model, by_rows, offload_policy)
    ignored = set(ignored_params or ())
    plan = _prepare(model, parts, mesh, mp_policy.param_dtype, ignored, embeddings)
    ignored |= set(_weights(model, by_rows, offload_policy))  # which are others now
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "mp_policy": mp_policy}
    settings |= {"offload_policy": offload_policy or OffloadPolicy(), "ignored_params": ignored or None}
    for module in (*parts, model):
        fully_shard(module, **settings)
    gather_ahead(model, parts)
    if reduce is not None:
        set_reduction(model, reduce)
    return plan


def _all_ranks() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            "shard: there is no process group. Start the program by torchrun, and call "
            "torch.distributed.init_process_group() first."
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _blocks(model: nn.Module, blocks: Sequence[nn.Module] | None) -> list[nn.Module]:
    if blocks is None:
        return [model.get_submodule(name) for name in blocks_of(model)]
    known = set(model.modules())
    for block in blocks:
        if block not in known or block is model:
            raise ConfigError(
                f"shard: blocks: {type(block).__name__} is not a module inside of the model. Pass modules of it, such "
                "as list(model.layers)."
            )
    return list(blocks)


def gather_ahead(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Have each block's weights gathered while the one before it computes.

    FSDP2 asks for a block's weights when its forward begins, and relies on a host that is far ahead of the GPU by then.
    Blocks in FP8 are done so soon that it is not.
    """
    for module, following in pairwise((model, *blocks)):
        cast(FSDPModule, module).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def _check(model: nn.Module, blocks: Sequence[nn.Module], reshard: Any) -> None:
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise UnsupportedError(
            f"shard: reshard_after_forward = {reshard}: PyTorch reshards to fewer ranks only what it gathers in its "
            "own dtype. Take True or False, or a mesh of two dimensions (HSDP)."
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedError("shard: a module is sharded already. Call it once, in place of fully_shard.")
    owner = _owners(model, blocks)
    for name, module in model.named_modules():
        if len({owner.get(member) for members in _together(module) for member in members}) > 1:
            raise UnsupportedError(
                f"shard: {name} is computed together with layers of another block: one would be computed while the "
                "other's weight is not there. Let a block hold all of them, or convert with Policy(fuse=False)."
            )


def _owners(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return for each module the block, or the model, with which its weights are gathered."""
    owner: dict[nn.Module, nn.Module] = dict.fromkeys(model.modules(), model)
    for block in blocks:  # an inner block comes after the one around it, or is gathered with it
        owner.update(dict.fromkeys(block.modules(), block))
    return owner


def _weights(
    model: nn.Module, by_rows: Sequence[nn.Embedding], offload: OffloadPolicy | None
) -> dict[nn.Parameter, nn.Embedding]:
    """Return the embeddings whose rows are sent, by their weights."""
    found = {}
    for module in by_rows:
        weight, uses = next(
            ((weight, uses) for weight, uses in uses_of(model) if any(use.module is module for use in uses)), (None, [])
        )
        if weight is None:
            raise ConfigError(f"shard: by_rows: {type(module).__name__} is no embedding of the model.")
        if len(uses) > 1:
            names = " and ".join(use.full_name for use in uses)
            raise UnsupportedError(f"shard: by_rows: {names} are one parameter, and only one of them looks up rows.")
        found[weight] = module
    if by_rows and isinstance(offload, CPUOffloadPolicy):
        raise UnsupportedError("shard: by_rows: rows are looked up on the device. Leave it out, or offload nothing.")
    return found


def _together(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers that a module makes one GEMM of, and of an MLP the layer after them."""
    if isinstance(module, FusedMLP):
        inner = [module.get_submodule(name) for name in module.mlp_roles.inner]
        return [inner, [module.get_submodule(module.mlp_roles.down)]]
    return [list(module.shared.layers)] if isinstance(module, Linear) and module.shared is not None else []


def _prepare(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    ignored: set[nn.Parameter],
    embeddings: Mapping[nn.Parameter, nn.Embedding],
) -> ShardPlan:
    """Make the weights of FP8 layers what is gathered in FP8, and return how all parameters are gathered."""
    rows, plain, ranks = [], 0, mesh.size(mesh.ndim - 1)
    scales, groups = TensorScales(), _groups(model)
    owners = _owners(model, blocks)
    stacks = {owner: RowStacks() for owner in owners.values()}
    for parameter, uses in uses_of(model):
        if parameter in ignored:
            continue
        if parameter in embeddings:
            rows.append(rows_plan(parameter, uses[0].full_name, dtype))
            plain += gather_plan(parameter, uses[0].full_name, None, dtype, ranks).bytes
            send_rows(embeddings[parameter], mesh, dtype)
            continue
        sent = target_or_reason(parameter, uses, ranks) if is_fp8_weight(uses) else None
        if isinstance(parameter, FP8Tensor) and not (isinstance(sent, Target) and sent.tile.rows == 1):
            raise UnsupportedError(
                f"shard: {uses[0].full_name} is {parameter!r}: it is sharded where it has one scale a row, and "
                "only FP8 layers read it."
            )
        name = uses[0].full_name
        rows.append(gather_plan(parameter, name, sent, dtype, ranks))
        plain += gather_plan(parameter, name, None, dtype, ranks).bytes
        if isinstance(sent, Target):
            module, attribute, count = uses[0].module, uses[0].attribute, local(parameter).shape[0]
            if sent.tile.rows is None:
                _wrap(parameter, uses, Gather(count, sent, scales=scales))
                scales.add(module, attribute, groups.get(module, name))
            else:
                _wrap(parameter, uses, Gather(count, sent, stacks=stacks[owners[module]]))
                stacks[owners[module]].add(module, attribute)
    model.register_load_state_dict_post_hook(lambda *_: weights_changed())
    return ShardPlan(ranks=ranks, parameters=tuple(rows), in_high_precision=plain)


def _groups(model: nn.Module) -> dict[nn.Module, int]:
    """Return for each layer that is one GEMM with others the number of its group."""
    lists = [members for module in model.modules() for members in _together(module)]
    return {member: id(members[0]) for members in lists for member in members}


def _wrap(parameter: nn.Parameter, uses: Sequence[Use], gather: Gather) -> None:
    values: Tensor = WeightShard(local(parameter).detach(), gather)
    if isinstance(parameter, DTensor):  # cut by tensor parallel
        values = placed_as(parameter, values)
    wrapped = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for use in uses:
        use.module._parameters[use.attribute] = wrapped
        use.module.register_state_dict_post_hook(leave_values)
        use.module.register_load_state_dict_post_hook(_wrap_again(use.attribute, gather))


def _wrap_again(name: str, gather: Gather) -> Callable[..., None]:
    """Return a hook for `load_state_dict(assign=True)`, which puts plain tensors in the place of shards."""

    def wrap(module: nn.Module, _: Any) -> None:
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor) and not isinstance(parameter._local_tensor, WeightShard):
            held = placed_as(parameter, WeightShard(parameter._local_tensor, gather))
            module._parameters[name] = nn.Parameter(held, requires_grad=parameter.requires_grad)

    return wrap
