"""Distribution of a model over the ranks of a run: tensor parallelism, sharding by FSDP2, reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.kernels.runtime.transfers import upload
from octavo.lab.train.parallel import Ranks
from octavo.lab.train.parallel_checks import two_level_sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from octavo.distributed import Context, Scheme, ShardPlan, TensorParallelPlan

_TWO_LEVEL_DIMS = ("copies", "hosts", "ranks", "tensor")
"""Mesh dimensions for a two-level reduction, which is over `hosts` and `ranks`."""


def shard_tp(ranks: Ranks, model: nn.Module, *, sequence: bool = True) -> TensorParallelPlan | None:
    """Split the layers of a converted model in place before sharding; return how, None without tensor parallelism.

    Args:
        model: converted model, or a stage of it.
        sequence: also split activations along the sequence; not in a pipeline stage.

    Raises:
        UnsupportedError: a layer has a recipe that keeps scales.
    """
    if ranks.mesh is None or ranks.parallel.tensor == 1:
        return None
    from octavo.distributed import tensor_parallel

    return tensor_parallel(model, ranks.mesh["tensor"], sequence=sequence)


def share_tokens(ranks: Ranks, model: nn.Module) -> Context | None:
    """Let ranks share the tokens of sequences, in place; return how, None without `parallel.context`."""
    if ranks.context is None:
        return None
    from octavo.distributed import context_parallel

    return context_parallel(model, ranks.context, attention=ranks.parallel.attention)


def make_reduction(ranks: Ranks) -> Scheme | None:
    """Return the scheme that reduces gradients over the ranks that share shards; None if FSDP2 does it.

    All ranks call it.
    """
    parallel, name = ranks.parallel, ranks.parallel.reduction
    is_whole = parallel.reduce is None and parallel.sizes(ranks.count)["shard"] == 1
    if not ranks.is_greedy and (ranks.mesh is None or name == "fp32" or is_whole):
        return None
    from octavo import distributed

    return distributed.reduction(name, _two_level_mesh(ranks) if name == "two-level" else None)


def shard_model(ranks: Ranks, model: nn.Module, reduction: Scheme | None = None) -> ShardPlan | None:
    """Shard a converted model, or a stage of it, in place; return how it is gathered. None with one rank.

    Args:
        model: converted model, or a stage of it.
        reduction: result of `make_reduction`.
    """
    if ranks.mesh is None or ranks.is_greedy:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from octavo.distributed import BF16_GRADIENTS_POLICY, BF16_POLICY, shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    if ranks.parallel.gather != "stored":
        each_is_reduced = reduction is not None and ranks.parallel.pipeline == 1
        policy = BF16_GRADIENTS_POLICY if each_is_reduced else BF16_POLICY
    embedding = getattr(model, "tok_embeddings", None)  # None in later stages
    by_rows = [embedding] if ranks.parallel.embedding == "rows" and embedding is not None else []
    return shard(
        model,
        _copies(ranks.mesh),
        mp_policy=policy,
        by_rows=by_rows,
        gather_int8=ranks.parallel.gather == "int8",
        reshard_after_forward=None if ranks.parallel.reshard and ranks.parallel.pipeline == 1 else False,
        reduce=reduction,
    )


def send_tokens(ranks: Ranks, tokens: Tensor, device: torch.device, models: Sequence[nn.Module], parts: int) -> Tensor:
    """Return host tokens on the device, for models that consume them in `parts` micro-batches."""
    if ranks.mesh is None or ranks.parallel.embedding == "whole":
        return upload(tokens, device)
    from octavo import distributed

    return distributed.send_tokens(tokens, device, *models, parts=parts)


def _two_level_mesh(ranks: Ranks) -> DeviceMesh:
    """Return the mesh of hosts and ranks per host within the ranks that share shards."""
    from torch.distributed.device_mesh import init_device_mesh

    assert ranks.device is not None
    sizes = two_level_sizes(ranks.parallel, ranks.count, ranks.launch.ranks_per_host)
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=_TWO_LEVEL_DIMS)["hosts", "ranks"]


def _copies(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh that models are sharded over: all dimensions but `tensor` and `pipeline`."""
    return mesh["data", "shard"] if "data" in (mesh.mesh_dim_names or ()) else mesh["shard"]
