"""Who trains on many GPUs: BF16 by FSDP2, torchao with its FP8 all-gather, and Octavo."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from octavo.distributed import BF16_GRADIENTS_POLICY, BF16_POLICY, shard
from octavo.distributed.sharding.shard import gather_ahead
from octavo.models.llama import Llama
from octavo.models.stages import Stage
from octavo.tensor import is_distributed
from octavo_bench.implementations import BF16, HEAD

Sharded = Llama | Stage
"""What is sharded: a whole model, or a stage of one."""
LEARNING_RATE = 1e-4


def _leave(model: nn.Module) -> None:
    """Change nothing."""


def _fsdp(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=BF16_POLICY, **options)
    fully_shard(model, mesh=mesh, mp_policy=BF16_POLICY, **options)
    gather_ahead(model, list(model.layers))  # as Octavo does it


def _fused_adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to train a sharded Llama. Its weights are FP32 where they rest, and gathered in BF16 or FP8."""

    name: str
    """What results call it."""
    convert: Callable[[nn.Module], object] = _leave
    """Makes the whole model into this implementation, in place, before it is cut."""
    shard: Callable[..., object] = _fsdp
    """(model or stage, mesh, **options of `fully_shard`): shards it, in place."""
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] = _fused_adamw
    """Of named parameters."""
    after_step: Callable[[nn.Module], object] = _leave
    """What it does with the model once the weights have changed."""


def implementations() -> dict[str, Implementation]:
    """Return every implementation by name, the baseline first. torchao's is there when it is installed."""
    found = [Implementation(name=BF16)]
    if importlib.util.find_spec("torchao") is not None:
        found.append(
            Implementation(
                name="torchao tensorwise, FP8 gather", convert=_convert_torchao, after_step=_precompute_scales
            )
        )
    found += [_octavo("folded"), _octavo("folded_fast")]
    by_default: dict[str, Any] = {"shard": _shard_bf16_gradients}
    found.append(_octavo("folded", ", bf16 gradients", **by_default))
    found.append(_octavo("folded", ", bf16 gradients, fp8 states", **by_default, optimizer=_fp8_states))
    with_head = partial(_convert, recipe="folded_fast", fp8_head=True)
    found.append(_octavo("folded_fast", ", fp8 head, bf16 gradients", **by_default, convert=with_head))
    lean: dict[str, Any] = {"convert": partial(_convert, recipe="folded", activation_inputs="fp8", norm_inputs="fp8")}
    found.append(_octavo("folded", ", bf16 gradients (lean)", **by_default, **lean, optimizer=_fp8_states))
    sends_least: dict[str, Any] = {"shard": _shard_fewest_bytes, "optimizer": _fp8_states}
    found.append(_octavo("folded", ", fp8-block", **sends_least))
    found.append(_octavo("folded", ", fp8-block (lean)", **sends_least, **lean))
    return {implementation.name: implementation for implementation in found}


def _octavo(recipe: str, suffix: str = "", **how: Any) -> Implementation:
    settings: dict[str, Any] = {"convert": partial(_convert, recipe=recipe), "shard": shard} | how
    return Implementation(name=f"octavo {recipe}{suffix}", **settings)


def _convert(model: nn.Module, recipe: str, *, fp8_head: bool = False, **policy_options: Any) -> None:
    assert isinstance(model, Llama)
    keep = {} if fp8_head else {HEAD: "in BF16, as the head of its peers"}
    policy = octavo.Policy(min_gain=0.0, keep=keep, **policy_options)
    octavo.convert(model, recipe, policy=policy, tokens=model.config.sequence)


def _shard_bf16_gradients(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    """As a run does it by default: gradients on the wire as they are computed, in BF16; sums in FP32."""
    shard(model, mesh, reduce="bf16", mp_policy=_policy(model), **options)


def _shard_fewest_bytes(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    """FP8 gradients, and of the embedding only the rows that are looked up."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]  # a later stage has none
    by_rows = [module for module in embeddings if not is_distributed(module.weight)]  # tensor parallel has its own
    shard(model, mesh, reduce="fp8-block", mp_policy=_policy(model), by_rows=by_rows, **options)


def _policy(model: Sharded) -> MixedPrecisionPolicy:
    """A pipeline adds up the gradients of its micro-batches before they are reduced."""
    return BF16_POLICY if isinstance(model, Stage) else BF16_GRADIENTS_POLICY


def _fp8_states(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return octavo.optim.AdamW(parameters, lr=LEARNING_RATE, states="fp8")


def _convert_torchao(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name != HEAD)


def _precompute_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
