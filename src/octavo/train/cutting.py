"""What `[parallel] tensor` can cut, and what it goes with: said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo import recipes
from octavo.errors import ConfigError
from octavo.optim import TIERS
from octavo.train.config import RunConfig


def check_cut(config: RunConfig, shards: int) -> None:
    """Check that `parallel.tensor` ranks can share the layers of a run.

    Args:
        shards: ranks that each part of a layer is sharded over.

    Raises:
        ConfigError: they cannot; the message names the key to change.
    """
    ranks = config.parallel.tensor
    if ranks == 1:
        return
    if config.model.architecture != "llama":
        raise ConfigError(
            f"parallel.tensor: {ranks}: a model of architecture '{config.model.architecture}' cannot be cut, only a"
            " 'llama'. Leave it at 1; parallel.shard takes all ranks."
        )
    for key, size, parts in _sizes(config, ranks, shards):
        if size % parts:
            raise ConfigError(
                f"{key}: {size} cannot be split evenly over {parts} ranks (parallel.tensor = {ranks}, each part sharded"
                f" over {shards}). Take a multiple of {parts}, or fewer ranks."
            )
    for key, value, why, instead in _alone(config):
        raise ConfigError(f"{key}: '{value}' does not go with parallel.tensor = {ranks}: {why}. Take {instead}.")


def _sizes(config: RunConfig, ranks: int, shards: int) -> Iterator[tuple[str, int, int]]:
    """Yield what is split: its key, its size, and over how many ranks."""
    model = config.model
    yield "model.heads", model.heads, ranks
    yield "model.kv_heads", model.key_value_heads, ranks
    yield "data.sequence", config.data.sequence, ranks
    # FSDP2 cuts the outputs of a rank once more, and not unevenly.
    yield "model.dim", model.dim, ranks * shards
    yield "model.kv_heads x size of a head", model.key_value_heads * model.head_dim, ranks * shards
    yield "model.ffn", model.ffn_dim, ranks * shards


def _alone(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield what cannot be right where layers are cut: its key and value, why, and what to take instead."""
    run, optimizer, parallel = config.run, config.optimizer, config.parallel
    if run.weights == "fp8":
        yield "run.weights", "fp8", "scales are of whole rows, and a rank has parts of them", "'fp32' or 'bf16'"
    if recipes.load(run.recipe).keeps_scales:
        why = "it keeps a scale of whole tensors from step to step, and a rank has parts"
        yield "run.recipe", run.recipe, why, "'folded', 'rowwise', 'block' or 'tensorwise'"
    if optimizer.name == "muon":
        yield "optimizer.name", "muon", "it makes whole matrices of one cut only", "'adamw' or 'lion'"
    if TIERS[optimizer.states].layout(optimizer.name, torch.float32, torch.float32, stochastic=True).searches:
        why = "it has one scale a tensor, and a rank has parts"
        yield "optimizer.states", optimizer.states, why, "'fp8', whose scales are of 128 values"
    if optimizer.gradients != "wide":
        yield "optimizer.gradients", optimizer.gradients, "a code has one scale a rank", "'wide'"
    if optimizer.loss_scale != "none":
        why = "an overflow is looked for on the ranks of one cut only"
        yield "optimizer.loss_scale", optimizer.loss_scale, why, "'none', which is all that BF16 needs"
    if parallel.reduce != "fp32":
        yield "parallel.reduce", parallel.reduce, "it is for layers that are whole", "'fp32'"
    if parallel.embedding != "whole":
        why = "the embedding is on each rank of a cut, which looks up its own tokens"
        yield "parallel.embedding", parallel.embedding, why, "'whole'"
