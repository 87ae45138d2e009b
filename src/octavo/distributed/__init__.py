"""Training on many GPUs, on top of PyTorch's FSDP2, DTensor and pipelining."""

from octavo.distributed.checkpoint import load, save, save_async
from octavo.distributed.context_parallel import Context, context_parallel
from octavo.distributed.expert_parallel import expert_parallel, rank_loads
from octavo.distributed.pipeline import PipelineStage, given_loss
from octavo.distributed.plans import GatherPlan, LayerPlan, ShardPlan, TensorParallelPlan
from octavo.distributed.reduce import REDUCTIONS, reduction
from octavo.distributed.reduce.hooks import set_reduction
from octavo.distributed.reduce.scheme import Scheme
from octavo.distributed.sharding.embedding import send_tokens
from octavo.distributed.sharding.shard import BF16_GRADIENTS_POLICY, BF16_POLICY, shard
from octavo.distributed.tensor_parallel.layers import ColumnParallel, Parallel, Replicated, RowParallel, tensor_parallel
from octavo.distributed.zero.greedy import Assignment, greedy_assignment
from octavo.distributed.zero.optimizer import GreedyZeRO, merge_state_dicts

__all__ = [
    "BF16_GRADIENTS_POLICY",
    "BF16_POLICY",
    "REDUCTIONS",
    "Assignment",
    "ColumnParallel",
    "Context",
    "GatherPlan",
    "GreedyZeRO",
    "LayerPlan",
    "Parallel",
    "PipelineStage",
    "Replicated",
    "RowParallel",
    "Scheme",
    "ShardPlan",
    "TensorParallelPlan",
    "context_parallel",
    "expert_parallel",
    "given_loss",
    "greedy_assignment",
    "load",
    "merge_state_dicts",
    "rank_loads",
    "reduction",
    "save",
    "save_async",
    "send_tokens",
    "set_reduction",
    "shard",
    "tensor_parallel",
]
