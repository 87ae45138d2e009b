"""Checks of `[parallel]` against the rest of a run file and the ranks that were started, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.torch_version import TorchVersion

from octavo import recipes
from octavo.errors import ConfigError
from octavo.lab.train.config import ParallelConfig, RunConfig

_Conflict = Callable[[str, object, str, str], ConfigError]
_STATELESS_RECIPES = "'folded', 'rowwise', 'block' or 'tensorwise'"


def check_parallel(config: RunConfig, ranks: int, ranks_per_host: int) -> None:
    """Check that a run can be split over the ranks that were started.

    Raises:
        ConfigError: `[parallel]` asks for another number of ranks, or for something that the run cannot be split by.
    """
    parallel, run = config.parallel, config.run
    sizes = parallel.sizes(ranks)
    if (required := math.prod(sizes.values())) != ranks:
        raise ConfigError(_wrong_rank_count(parallel, required, ranks))
    if ranks == 1:
        return
    shards, group = sizes["shard"], parallel.tensor * parallel.pipeline * parallel.context
    parts = ranks // group
    if run.batch % (run.accumulate * parts):
        over = f"{parts} ranks" if group == 1 else f"{parts} groups of {group} ranks"
        raise ConfigError(
            f"run.batch: {run.batch} sequences cannot be split evenly over {over} with {run.accumulate} parts"
            f" each. Take a multiple of {run.accumulate * parts}."
        )
    check_tensor(config, shards)
    check_pipeline(config)
    check_context(config)
    if run.leaves_recipe and (group > 1 or parallel.zero == "greedy" or run.weights == "fp8"):
        raise ConfigError(
            "run.bf16_first_steps, run.last_share: ranks that share layers, parallel.zero = 'greedy' and FP8 weights on"
            " several ranks keep one recipe for the whole run. Leave both at 0, or train by FSDP2 alone."
        )
    if config.sensitivity.every:
        raise ConfigError(
            "sensitivity.every: weights that are sharded over ranks keep their recipe. Leave it at 0: what `octavo"
            " localize` measures is a recipe that ranks take."
        )
    if parallel.zero == "greedy":
        _refuse_with_greedy(config, ranks, partial(_conflict, "parallel.zero = 'greedy'"))
    elif parallel.reduce not in (None, "fp32") and shards == 1 and parallel.data > 1:
        raise ConfigError(
            f"parallel.reduce: '{parallel.reduce}' applies to ranks that share the shards of a model. With data ="
            f" {parallel.data} on {ranks} ranks nothing is sharded: copies are summed in FP32. Take a smaller data, or"
            " 'fp32'."
        )
    if parallel.reduce == "two-level":
        two_level_sizes(parallel, ranks, ranks_per_host)


def two_level_sizes(parallel: ParallelConfig, ranks: int, ranks_per_host: int) -> tuple[int, int, int, int]:
    """Return the mesh of a two-level reduction: copies, hosts per copy, ranks per host, tensor-parallel ranks.

    Args:
        parallel: the section of the run file.
        ranks: number of ranks of the run.
        ranks_per_host: number of consecutive ranks on each host.

    Raises:
        ConfigError: a host boundary splits a tensor-parallel group, or hosts would have different numbers of ranks.
    """
    tensor, copies = parallel.tensor, parallel.data * parallel.pipeline
    per_copy = ranks // copies
    fewer, more = sorted((ranks_per_host, per_copy))
    if more % fewer or ranks_per_host % tensor:
        raise ConfigError(
            f"parallel.reduce: 'two-level' sums within each host first, but {per_copy} ranks per model or stage cannot"
            f" be divided evenly over hosts of {ranks_per_host} ranks (parallel.tensor = {tensor}). Take 'fp8-block'."
        )
    return copies, per_copy // fewer, fewer // tensor, tensor


def check_tensor(config: RunConfig, shards: int) -> None:
    """Check that the layers of a run can be split over `parallel.tensor` ranks.

    Args:
        config: the run.
        shards: ranks that FSDP2 shards each part over.

    Raises:
        ConfigError: they cannot; the message names the key to change.
    """
    ranks = config.parallel.tensor
    if ranks == 1:
        return
    if config.model.architecture != "llama":
        raise ConfigError(
            f"parallel.tensor: {ranks}: tensor parallelism supports only architecture 'llama', not"
            f" '{config.model.architecture}'. Leave it at 1; parallel.shard takes all ranks."
        )
    for key, size, parts in _tensor_sizes(config, ranks, shards):
        if size % parts:
            raise ConfigError(
                f"{key}: {size} cannot be split evenly over {parts} ranks (parallel.tensor = {ranks}, each part sharded"
                f" over {shards}). Take a multiple of {parts}, or fewer ranks."
            )
    _refuse_with_tensor(config, partial(_conflict, f"parallel.tensor = {ranks}"))


def check_pipeline(config: RunConfig) -> None:
    """Check that the blocks of a run can be split into stages over `parallel.pipeline` ranks.

    Raises:
        ConfigError: they cannot; the message names the key to change.
    """
    ranks, parallel = config.parallel.pipeline, config.parallel
    if ranks == 1:
        return
    stages = ranks if parallel.schedule == "1f1b" else 2 * ranks
    if config.model.layers < stages:
        raise ConfigError(
            f"model.layers: {config.model.layers} blocks are too few for {stages} stages (parallel.pipeline = {ranks},"
            f" parallel.schedule = '{parallel.schedule}'). Take {stages} or more, or fewer ranks."
        )
    if config.run.accumulate % ranks:
        raise ConfigError(
            f"run.accumulate: {config.run.accumulate} micro-batches do not fill a pipeline of {ranks} ranks. Take a"
            f" multiple of {ranks}; {4 * ranks} leave few ranks idle."
        )
    _refuse_with_pipeline(config, partial(_conflict, f"parallel.pipeline = {ranks}"))


def check_context(config: RunConfig) -> None:
    """Check that the sequences of a run can be shared by `parallel.context` ranks.

    Raises:
        ConfigError: they cannot; the message names the key to change.
    """
    ranks, length = config.parallel.context, config.data.sequence
    if ranks == 1:
        if config.parallel.attention != "auto":
            raise ConfigError(f"parallel.attention: '{config.parallel.attention}' has no effect with context = 1.")
        return
    if length % (2 * ranks):
        raise ConfigError(
            f"data.sequence: {length} tokens cannot be shared evenly by {ranks} ranks (parallel.context), each with two"
            f" chunks. Take a multiple of {2 * ranks}."
        )
    _refuse_with_context(config, partial(_conflict, f"parallel.context = {ranks}"))


def _refuse_with_context(config: RunConfig, conflict: _Conflict) -> None:
    parallel, run, model = config.parallel, config.run, config.model
    if model.architecture != "llama":
        raise conflict("model.architecture", model.architecture, "only a Llama takes its own tokens", "'llama'")
    if model.documents != "joined":
        key, value = ("data.format", "chat") if config.data.format == "chat" else ("model.documents", "separate")
        raise conflict(key, value, "attention over several ranks has no mask of documents", "parallel.shard")
    for name in ("tensor", "pipeline"):
        if getattr(parallel, name) > 1:
            raise conflict(f"parallel.{name}", getattr(parallel, name), "tokens are split already", "1")
    if parallel.zero != "fsdp":
        raise conflict("parallel.zero", parallel.zero, "each of its ranks has other sequences", "'fsdp'")
    if parallel.embedding != "whole":
        raise conflict("parallel.embedding", parallel.embedding, "rows are sent for whole sequences", "'whole'")
    if run.compile == "on":
        raise conflict("run.compile", "on", "the exchange of keys and values is not compiled", "'auto'")
    if _has_tensor_scales(recipes.load(run.recipe)):
        reason = "its scale per tensor would be of each rank's tokens, not of the sequence's"
        raise conflict("run.recipe", run.recipe, reason, "'folded', 'rowwise', 'block' or 'delayed'")


def _has_tensor_scales(recipe: recipes.Recipe) -> bool:
    """Return True if an operand that is of tokens has one scale, of the tokens that are there."""
    of_tokens = [recipe.fprop.input, recipe.dgrad.grad_output, recipe.wgrad.grad_output, recipe.wgrad.input]
    gemms = [recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.wgrad]
    own = any(
        gemm.is_fp8 and operand.granularity == "tensor" and operand.scale_from == "current"
        for gemm, operand in zip(gemms, of_tokens, strict=True)
    )
    return own or any(map(_has_tensor_scales, recipe.modules.values()))


def _wrong_rank_count(parallel: ParallelConfig, required: int, started: int) -> str:
    asked = f"data = {parallel.data}, shard = {parallel.shard or 'all others'}"
    asked += f", context = {parallel.context}" if parallel.context > 1 else ""
    asked += f", tensor = {parallel.tensor}" if parallel.tensor > 1 else ""
    asked += f", pipeline = {parallel.pipeline}" if parallel.pipeline > 1 else ""
    return (
        f"parallel: {asked} want {required} ranks, and {started} {'was' if started == 1 else 'were'} started. Start the"
        f" run with torchrun --nproc-per-node {required} -m octavo train ..., or change them."
    )


def _tensor_sizes(config: RunConfig, ranks: int, shards: int) -> Iterator[tuple[str, int, int]]:
    """Yield the key of each size that is split, the size, and the number of ranks."""
    model = config.model
    yield "model.heads", model.heads, ranks
    yield "model.kv_heads", model.key_value_heads, ranks
    yield "data.sequence", config.data.sequence, ranks
    # FSDP2 shards each rank's output features once more, and only evenly.
    yield "model.dim", model.dim, ranks * shards
    yield "model.kv_heads x size of a head", model.key_value_heads * model.head_dim, ranks * shards
    yield "model.ffn", model.ffn_dim, ranks * shards


def _conflict(setting: str, key: str, value: object, reason: str, instead: str) -> ConfigError:
    """Return the error of a key that cannot be combined with a setting; `instead` is as the user writes it."""
    return ConfigError(f"{key}: '{value}' does not go with {setting}: {reason}. Take {instead}.")


def _refuse_with_tensor(config: RunConfig, conflict: _Conflict) -> None:
    run, parallel = config.run, config.parallel
    if recipes.load(run.recipe).has_stored_scales:
        reason = "it keeps a scale per tensor from step to step, and each rank has part of a tensor"
        raise conflict("run.recipe", run.recipe, reason, _STATELESS_RECIPES)
    _refuse_of_model(config, conflict)
    if parallel.embedding != "whole":
        reason = "each tensor-parallel rank has the embedding, and looks up its own tokens"
        raise conflict("parallel.embedding", parallel.embedding, reason, "'whole'")


def _refuse_with_greedy(config: RunConfig, ranks: int, conflict: _Conflict) -> None:
    parallel, optimizer = config.parallel, config.optimizer
    if parallel.data != ranks:
        raise conflict("parallel.data", parallel.data, f"each of the {ranks} ranks has all weights", f"{ranks}")
    if parallel.reduce == "two-level":
        raise conflict("parallel.reduce", "two-level", "it sends gradients to the ranks that own them", "'fp8-block'")
    if parallel.embedding != "whole":
        raise conflict("parallel.embedding", parallel.embedding, "each rank has the whole embedding", "'whole'")
    if optimizer.gradients != "wide":
        reason = "they are reduced before they are rounded"
        raise conflict("optimizer.gradients", optimizer.gradients, reason, "'wide'")
    if optimizer.loss_scale != "none":
        reason = "an overflow must be known before gradients are sent"
        raise conflict("optimizer.loss_scale", optimizer.loss_scale, reason, "'none'")
    if optimizer.clip_per_group:
        reason = "groups are clipped before the step, in which gradients are reduced"
        raise conflict("optimizer.clip_per_group", "given", reason, "optimizer.clip alone")


def _refuse_of_model(config: RunConfig, conflict: _Conflict) -> None:
    """Refuse what a model must not have if its layers are split or in several stages."""
    if config.lora.rank:
        raise conflict("lora.rank", config.lora.rank, "updates of layers are not split", "parallel.shard")
    if config.model.documents == "separate":
        reason = "the mask of documents is made of all tokens, by the model as a whole"
        key, value = ("data.format", "chat") if config.data.format == "chat" else ("model.documents", "separate")
        raise conflict(key, value, reason, "parallel.shard")


def _refuse_with_pipeline(config: RunConfig, conflict: _Conflict) -> None:
    model, run, optimizer, parallel = config.model, config.run, config.optimizer, config.parallel
    if model.architecture != "llama":
        raise conflict("model.architecture", model.architecture, "only a Llama is split into stages", "'llama'")
    _refuse_of_model(config, conflict)
    if model.tie_embeddings:
        reason = "the embedding is also the head, which is in another stage"
        raise conflict("model.tie_embeddings", "true", reason, "false")
    if recipes.load(run.recipe).has_stored_scales:
        reason = "it keeps scales of all layers together from step to step"
        raise conflict("run.recipe", run.recipe, reason, _STATELESS_RECIPES)
    if parallel.splits_backward:
        if run.compile == "on":
            reason = f"'{parallel.schedule}' splits the backward pass of a block"
            raise conflict("run.compile", "on", reason, "'auto'")
        if TorchVersion(torch.__version__) < "2.13":
            reason = f"PyTorch {torch.__version__} splits the backward pass of its own layers only"
            raise conflict("parallel.schedule", parallel.schedule, reason, "'1f1b' or 'interleaved', or PyTorch 2.13")
    if optimizer.gradients != "wide":
        reason = "their norm would cover one stage only"
        raise conflict("optimizer.gradients", optimizer.gradients, reason, "'wide'")
