"""`shard`: PyTorch's `fully_shard` for a converted model, whose weights are then gathered as FP8 codes.

FSDP2 does the work. This file wraps the weights so that FSDP2 gathers them in FP8 (`weights`), calls `fully_shard` on
each block and on the model, and keeps state dicts free of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from octavo.distributed.checkpoint import plain_values_hook
from octavo.distributed.plans import ParameterUse, ShardPlan, gather_plan, uses_of, weight_codes_or_reason
from octavo.distributed.reduce import reduction
from octavo.distributed.reduce.hooks import set_reduction
from octavo.distributed.reduce.scheme import Scheme
from octavo.distributed.sharding.embedding import check_rows, send_rows
from octavo.distributed.sharding.weights import GatherSpec, Memory, UnitCodes, WeightShard
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec
from octavo.nn.fused import FusedMLP
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import blocks_of
from octavo.tensor import FP8Tensor, local
from octavo.tensor.local import dtensor_like

BF16_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
"""Parameters not in FP8 are gathered in BF16, gradients are reduced in FP32. Inputs are not cast: a rotary table in
BF16 would round positions."""
BF16_GRADIENTS_POLICY = replace(BF16_POLICY, reduce_dtype=torch.bfloat16)
"""Policy for `reduce`: its schemes receive gradients in BF16, as computed, and still sum them in FP32. Not for backward
passes that defer the reduction (`set_requires_gradient_sync`, pipelines), which would accumulate in BF16."""


@dataclass(frozen=True, kw_only=True)
class FullyShardOptions:
    """Arguments of `fully_shard` that FP8 weights can be gathered with."""

    reshard_after_forward: bool | None = None
    """Not a number."""
    mp_policy: MixedPrecisionPolicy = BF16_POLICY
    """`BF16_GRADIENTS_POLICY` moves fewer bytes where `reduce` is given."""
    offload_policy: OffloadPolicy | None = None
    ignored_params: set[nn.Parameter] | None = None


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Sequence[nn.Module] | None = None,
    reduce: str | Scheme | None = None,
    by_rows: Sequence[nn.Embedding] = (),
    gather_int8: bool = False,
    **fsdp: Any,
) -> ShardPlan:
    """Shard a model over the ranks of a mesh, in place: `fully_shard` on each block, then on the model.

    Call it after `octavo.convert` and before creating the optimizer, like `fully_shard`. Weights of FP8 layers are
    gathered as codes and scales where their recipe allows it: quantised from the shard in each gather, and bitwise
    equal to those of the whole weight. All other parameters are gathered as FSDP2 does.

    Args:
        mesh: 1-D; or 2-D with names, the first replicated and the second sharded (HSDP). By default all ranks.
        blocks: units of gathering, in execution order: the weights of one are gathered while the previous one computes.
            By default the children of the `nn.ModuleList` with the most parameters.
        reduce: gradient reduction over the ranks that share the shards, as for `set_reduction`; by default FSDP2's
            reduce-scatter in the policy's `reduce_dtype`.
        by_rows: embeddings of which only looked-up rows are sent (see `embedding`), worthwhile where a rank has fewer
            tokens than the vocabulary has rows. Nothing else may read their weights. Their gradients are averaged in
            FP32, regardless of `reduce`.
        gather_int8: send weights that fprop reads in INT8 (recipe `rotated`) as these codes, half the bytes of BF16.
            Each rank decodes them into values, from which layers make their codes: in fprop the same but for the
            rounding of values to the policy's `param_dtype`, in dgrad rounded twice. High precision reads the decoded
            values too.
        fsdp: fields of `FullyShardOptions`, arguments of `fully_shard`.

    Returns:
        How each parameter is gathered.

    Raises:
        ConfigError: no process group, a mesh of another form, an unknown `reduce`, or a block or an embedding that is
            not one of the model's modules.
        UnsupportedError: fused layers are in different blocks, the model is sharded already, or `reshard_after_forward`
            is a number; a parameter is a scalar or not contiguous, or in FP8 without row-wise scales; or an embedding
            of `by_rows` uses options beyond row lookup, is shared, or is to be offloaded.
    """
    options = FullyShardOptions(**fsdp)
    offload, ignored = options.offload_policy, set(options.ignored_params or ())
    mesh = _all_ranks() if mesh is None else mesh
    parts = _blocks(model, blocks)
    scheme = reduction(reduce) if isinstance(reduce, str) else reduce
    _check_mesh(mesh)
    _check(model, parts, options.reshard_after_forward)
    embeddings = _row_embeddings(model, by_rows, offload)
    plan = _prepare(model, parts, mesh, options.mp_policy.param_dtype, ignored, embeddings, gather_int8)
    ignored.update(parameter for module in by_rows for parameter in module.parameters())  # new ones by now
    settings = vars(options) | {"offload_policy": offload or OffloadPolicy(), "ignored_params": ignored or None}
    for module in (*parts, model):
        fully_shard(module, mesh=mesh, **settings)
    gather_ahead(model, parts)
    if scheme is not None:
        set_reduction(model, scheme)
    return plan


def _all_ranks() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError(
            "shard: there is no process group. Start the program with torchrun, and call "
            "torch.distributed.init_process_group() first."
        )
    device = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh("cpu" if device is None else device.type, (dist.get_world_size(),))


def _blocks(model: nn.Module, blocks: Sequence[nn.Module] | None) -> list[nn.Module]:
    if blocks is None:
        return [model.get_submodule(name) for name in blocks_of(model)]
    known = set(model.modules())
    for block in blocks:
        if block not in known or block is model:
            raise ConfigError(
                f"shard: blocks: {type(block).__name__} is not a submodule of the model. Pass modules of it, such as "
                "list(model.layers)."
            )
    return list(blocks)


def gather_ahead(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Prefetch each block's weights while the previous block computes.

    By default FSDP2 gathers a block's weights when its forward begins, relying on a host far ahead of the GPU. FP8
    blocks are too short for that.
    """
    for module, following in pairwise((model, *blocks)):
        cast(FSDPModule, module).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2) or (mesh.ndim == 2 and mesh.mesh_dim_names is None):
        form = "2 dimensions without names" if mesh.ndim == 2 else f"{mesh.ndim} dimensions"
        raise ConfigError(
            f"shard: a mesh of {form}. Pass one of them, as mesh['shard'], or two with names, as mesh['data', 'shard']."
        )


def _check(model: nn.Module, blocks: Sequence[nn.Module], reshard: Any) -> None:
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        raise UnsupportedError(
            f"shard: reshard_after_forward = {reshard}: PyTorch cannot reshard FP8 weights to fewer ranks. Take True "
            "or False, or a 2-D mesh (HSDP)."
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedError("shard: a module is sharded already. Call it once, instead of fully_shard.")
    for module in (*blocks, model):
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"shard: {type(module).__name__} has no forward, before which FSDP2 gathers weights. Pass the modules"
                " in it as blocks, such as list(model.layers), or the module around it."
            )
    owner = _gather_units(model, blocks)
    for name, module in model.named_modules():
        if len({owner.get(member) for members in _fused_groups(module) for member in members}) > 1:
            raise UnsupportedError(
                f"shard: {name} is fused with layers of another block, whose weights are not gathered at the same "
                "time. Let one block contain all of them, or convert with Policy(fuse=False)."
            )


def _gather_units(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return the gather unit, a block or the model, of each module."""
    owner: dict[nn.Module, nn.Module] = dict.fromkeys(model.modules(), model)
    for block in blocks:  # a nested block comes after the outer one, or is gathered with it
        owner.update(dict.fromkeys(block.modules(), block))
    return owner


def _row_embeddings(
    model: nn.Module, by_rows: Sequence[nn.Embedding], offload: OffloadPolicy | None
) -> dict[nn.Parameter, nn.Embedding]:
    """Return the embeddings of `by_rows`, by weight."""
    found, known = {}, dict(uses_of(model))
    for module in by_rows:
        weight = next((p for p, uses in known.items() if any(use.module is module for use in uses)), None)
        if weight is None:
            raise ConfigError(f"shard: by_rows: {type(module).__name__} is not an embedding of the model.")
        if len(known[weight]) > 1:
            names = " and ".join(use.full_name for use in known[weight])
            raise UnsupportedError(f"shard: by_rows: {names} share one parameter. Leave it out.")
        check_rows(module)
        found[weight] = module
    if by_rows and isinstance(offload, CPUOffloadPolicy):
        raise UnsupportedError("shard: by_rows: rows are looked up on the device. Leave it out, or do not offload.")
    return found


def _fused_groups(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers that a module fuses into one GEMM; for an MLP also its down projection."""
    if isinstance(module, FusedMLP):
        inner = [module.get_submodule(name) for name in module.mlp_roles.inner]
        return [inner, [module.get_submodule(module.mlp_roles.down)]]
    return [list(module.shared.layers)] if isinstance(module, LinearLayer) and module.shared is not None else []


def _prepare(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    ignored: set[nn.Parameter],
    embeddings: Mapping[nn.Parameter, nn.Embedding],
    gather_int8: bool,
) -> ShardPlan:
    """Wrap the weights of FP8 layers so that they are gathered in FP8, and return the plan of all parameters."""
    rows, plain, ranks = [], 0, mesh.size(mesh.ndim - 1)
    groups, owners = _groups(model), _gather_units(model, blocks)
    memory: Memory = {}
    units = {owner: UnitCodes(memory) for owner in owners.values()}
    every = [(parameter, uses) for parameter, uses in uses_of(model) if parameter not in ignored]
    codes = {
        p: weight_codes_or_reason(p, uses, ranks, gather_int8=gather_int8) for p, uses in every if p not in embeddings
    }
    for parameter, uses in every:  # check all before changing one
        _check_parameter(parameter, uses[0].full_name, codes.get(parameter))
    for parameter, uses in every:
        name = uses[0].full_name
        in_high_precision = gather_plan(parameter, name, None, dtype, ranks)
        plain += in_high_precision.bytes
        if parameter in embeddings:
            looked_up = f"{in_high_precision.sent}, rows looked up"
            rows.append(replace(in_high_precision, sent=looked_up, bytes=0))
            send_rows(embeddings[parameter], mesh, dtype)
            continue
        sent = codes[parameter]
        rows.append(gather_plan(parameter, name, sent, dtype, ranks))
        if isinstance(sent, QuantSpec):
            module, attribute, count = uses[0].module, uses[0].attribute, local(parameter).shape[0]
            unit = units[owners[module]]
            unit.add(module, attribute, groups.get(module, name))
            decodes = gather_int8 and sent.fmt.is_integer
            _wrap(parameter, uses, GatherSpec(count, -(-count // ranks), sent, decodes, unit))
    return ShardPlan(ranks=ranks, parameters=tuple(rows), in_high_precision=plain)


def _check_parameter(parameter: nn.Parameter, name: str, sent: QuantSpec | str | None) -> None:
    """Check that FSDP2 can shard a parameter, and gather it as `sent`, see `weight_codes_or_reason`."""
    if isinstance(parameter, FP8Tensor) and not (isinstance(sent, QuantSpec) and sent.tile.rows == 1):
        raise UnsupportedError(
            f"shard: {name} is {parameter!r}: an FP8 weight needs row-wise scales, and may be read by FP8 layers only."
        )
    if parameter.dim() == 0 or not parameter.is_contiguous():
        wrong = "a scalar" if parameter.dim() == 0 else f"not contiguous: its strides are {parameter.stride()}"
        raise UnsupportedError(f"shard: {name} is {wrong}, which FSDP2 cannot shard. Name it in ignored_params.")


def _groups(model: nn.Module) -> dict[nn.Module, int]:
    """Return a group id for each layer that is fused with others into one GEMM."""
    lists = [members for module in model.modules() for members in _fused_groups(module)]
    return {member: id(members[0]) for members in lists for member in members}


def _wrap(parameter: nn.Parameter, uses: Sequence[ParameterUse], gather: GatherSpec) -> None:
    wrapped = _wrapped(parameter, gather)
    for use in uses:
        use.module._parameters[use.attribute] = wrapped
        use.module.register_state_dict_post_hook(plain_values_hook)
        use.module.register_load_state_dict_post_hook(partial(_wrap_again, use.attribute, gather))


def _wrap_again(name: str, gather: GatherSpec, module: nn.Module, _: Any) -> None:
    """Wrap a parameter again after `load_state_dict(assign=True)` replaced it by a plain tensor: a hook."""
    parameter = module._parameters[name]
    if isinstance(parameter, DTensor) and not isinstance(parameter._local_tensor, WeightShard):
        module._parameters[name] = _wrapped(parameter, gather)


def _wrapped(parameter: nn.Parameter, gather: GatherSpec) -> nn.Parameter:
    values: Tensor = WeightShard(local(parameter).detach(), gather)
    if isinstance(parameter, DTensor):
        values = dtensor_like(parameter, values)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
