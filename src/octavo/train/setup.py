"""From a configuration to what a run works with: the device, the text, the lanes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.conversion import Plan, Policy, convert
from octavo.data import (
    CorpusStatistics,
    Loader,
    TokenFiles,
    corpus_statistics,
    heldout_batches,
    load_tokenizer,
    prepare,
)
from octavo.errors import ConfigError
from octavo.models import build
from octavo.train import device as devices
from octavo.train.config import RunConfig
from octavo.train.lane import Lane
from octavo.train.parallel import ALONE, Ranks
from octavo.train.replay import Graphs

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Setup:
    """The parts of a run, before its first step."""

    config: RunConfig
    """As it was asked for."""
    device: torch.device
    """Where the lanes live."""
    lanes: tuple[Lane, ...]
    """The FP8 model, its BF16 twin, or both in this order."""
    plan: Plan | None
    """The conversion of the FP8 model, the newest; None for a run in BF16 alone."""
    loader: Loader
    """Training batches."""
    heldout: list[Batch]
    """The fixed evaluation batches, `(inputs_BT, targets_BT)` on the CPU."""
    corpus: TokenFiles
    """The text, tokenized and split."""
    statistics: CorpusStatistics
    """What that text is like."""
    ranks: Ranks = ALONE
    """The processes that share the work."""


def set_up(config: RunConfig, ranks: Ranks = ALONE) -> Setup:
    """Prepare the text, build and convert the models, shard them over the ranks.

    Raises:
        ConfigError: an unknown recipe or device, weights that the recipe cannot compute with, or a CUDA graph of steps
            that cannot be captured.
        DataError: a source without text, or with less text than a batch.
    """
    recipe = recipes.load(config.run.recipe)
    device = ranks.device or devices.resolve(config.run.device)
    policy_of(config, recipe)  # what is refused, before the text, which takes longer
    replays(config, device, ranks)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    loader, heldout, corpus, statistics = ranks.in_turn("text", lambda: _text(config, ranks))
    torch.manual_seed(config.run.seed)
    lanes, plan = make_lanes(config, recipe, device, ranks)
    if ranks.count > 1:
        torch.manual_seed(config.run.seed + ranks.rank)  # ranks draw for parts of their own
    return Setup(config, device, lanes, plan, loader, heldout, corpus, statistics, ranks)


def _text(config: RunConfig, ranks: Ranks) -> tuple[Loader, list[Batch], TokenFiles, CorpusStatistics]:
    data, run = config.data, config.run
    cache = data.cache.expanduser()
    tokenizer = load_tokenizer(data.tokenizer, source=data.source, cache_dir=cache)
    if tokenizer.vocab > config.model.vocab:
        raise ConfigError(
            f"model.vocab: {config.model.vocab} is too small for the tokenizer '{data.tokenizer}', which"
            f" needs {tokenizer.vocab}; leave model.vocab out."
        )
    files = prepare(data.source, tokenizer, cache, data.heldout)
    own = run.batch // ranks.parts
    loader = Loader(files.train, own, data.sequence, run.seed, rank=ranks.part, world=ranks.parts)
    part = run.batch // run.accumulate
    heldout = list(heldout_batches(files.heldout, part, data.sequence, limit_tokens=run.eval_tokens))
    return loader, heldout, files, corpus_statistics(files, tokenizer)


def make_lanes(
    config: RunConfig, recipe: recipes.Recipe, device: torch.device, ranks: Ranks = ALONE
) -> tuple[tuple[Lane, ...], Plan | None]:
    """Return what is trained, and the plan of the FP8 model.

    Both lanes start from the same bits: the twin is a copy, made before weights are rounded or converted.
    """
    model = build(config.model, config.run.seed).to(device)
    twin = copy.deepcopy(model) if config.run.twin and recipe.is_fp8 else None
    hold_as(config.run.weights, model)
    graphs = Graphs() if replays(config, device, ranks) else None
    if not recipe.is_fp8:
        return (_lane("bf16", model, config, device, ranks, graphs),), None
    plan = convert_as(config, model, recipe, ranks)
    lanes = [_lane("fp8", model, config, device, ranks, graphs)]
    if twin is not None:
        lanes.append(_lane("bf16", twin, config, device, ranks, graphs))
    return tuple(lanes), plan


def convert_as(
    config: RunConfig, model: nn.Module, recipe: recipes.Recipe, ranks: Ranks = ALONE, policy: Policy | None = None
) -> Plan:
    """Convert a model of a run in place, also once more: with its tokens and its calibration file; return the plan.

    Args:
        recipe: that of the run, or what some of its layers have in place of it.
        policy: by default `policy_of`.
    """
    policy, scales = policy or policy_of(config, recipe), config.run.scales or None
    return convert(model, recipe, policy=policy, tokens=tokens_of(config, ranks), scales=scales)


def tokens_of(config: RunConfig, ranks: Ranks) -> int:
    """Return the tokens of one forward on a rank."""
    return config.run.batch // (config.run.accumulate * ranks.parts) * config.data.sequence


def policy_of(config: RunConfig, recipe: recipes.Recipe) -> Policy:
    """Return the policy that the FP8 model of a run is converted by.

    Raises:
        ConfigError: weights in FP8 for a recipe without layers in FP8.
    """
    fp8 = config.run.weights == "fp8"
    if fp8 and not recipe.is_fp8:
        raise ConfigError(f"run.weights: 'fp8' is for layers in FP8, and recipe '{recipe.name}' has none. Take 'bf16'.")
    return Policy(min_gain=config.run.min_gain, weights="fp8" if fp8 else "as_they_are")


def hold_as(weights: str, model: nn.Module) -> None:
    """Round parameters to BF16 unless `run.weights` is fp32; the tables among a model's buffers stay as they are."""
    for parameter in model.parameters() if weights != "fp32" else ():
        parameter.data = parameter.data.bfloat16()


def _lane(
    name: str, model: nn.Module, config: RunConfig, device: torch.device, ranks: Ranks, graphs: Graphs | None
) -> Lane:
    parallel = ranks.parallel
    auto = device.type == "cuda" and not parallel.goes_backward_by_parts
    compiled = {"on": True, "off": False, "auto": auto}[config.run.compile]
    if compiled:
        for block in model.get_submodule("layers").children():
            block.compile(fullgraph=True)
    seed = config.run.seed + ranks.place  # of roundings: stages are not to draw the same bits
    if parallel.pipeline == 1:
        return Lane(name, model, config.optimizer, seed=seed, ranks=ranks, graphs=graphs)
    from octavo.train.pipelined import PipelinedLane

    return PipelinedLane(name, model, config.optimizer, seed=seed, ranks=ranks)


def replays(config: RunConfig, device: torch.device, ranks: Ranks = ALONE) -> bool:
    """Return whether the passes of a run are to be replayed as a CUDA graph.

    Raises:
        ConfigError: they cannot be, and `run.graph` is `on`.
    """
    against = f"{ranks.count} ranks share the run" if ranks.count > 1 else ""
    against = against if device.type == "cuda" else f"the run is on a {device.type.upper()}"
    if config.run.graph == "on" and against:
        raise ConfigError(f"run.graph: 'on' needs one GPU, but {against}. Take 'auto' or 'off'.")
    return config.run.graph != "off" and not against
