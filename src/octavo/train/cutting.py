"""What `[parallel] tensor` can cut, and what it goes with: said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

from octavo import recipes
from octavo.errors import ConfigError
from octavo.train.config import RunConfig
from octavo.train.refusals import Refusal, refuse


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
    refuse(_alone(config), f"parallel.tensor = {ranks}")


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


def _alone(config: RunConfig) -> Iterator[Refusal]:
    """Yield what cannot be right where layers are cut."""
    run, parallel = config.run, config.parallel
    if recipes.load(run.recipe).keeps_scales:
        why = "it keeps a scale of whole tensors from step to step, and a rank has parts"
        yield Refusal("run.recipe", run.recipe, why, "'folded', 'rowwise', 'block' or 'tensorwise'")
    if parallel.embedding != "whole":
        why = "the embedding is on each rank of a cut, which looks up its own tokens"
        yield Refusal("parallel.embedding", parallel.embedding, why, "'whole'")
