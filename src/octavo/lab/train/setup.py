"""Set up a run from its configuration: device, text, models."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo import recipes
from octavo._util.config_reader import blaming, read_file
from octavo.conversion import Plan, Policy, compile_blocks, convert, make_plan, revert
from octavo.conversion.layer_plan import Weights
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.lab.data import (
    CorpusStatistics,
    Loader,
    TokenFiles,
    Tokenizer,
    corpus_statistics,
    heldout_batches,
    load_tokenizer,
    prepare,
)
from octavo.lab.data.chat import ChatFormat
from octavo.lab.data.loader import Batch
from octavo.lab.models import build
from octavo.lab.train import device as devices
from octavo.lab.train.config import DataConfig, RunConfig
from octavo.lab.train.parallel import SINGLE_PROCESS, Ranks
from octavo.lab.train.replay import Graphs
from octavo.lab.train.train_state import TrainState
from octavo.nn.lora import add_lora
from octavo.recipes.spec import override


@dataclass(slots=True)
class Setup:
    """The parts of a run. `states` loses a baseline that failed; `plan` follows each conversion of the FP8 model."""

    config: RunConfig
    """The configuration of the run."""
    device: torch.device
    """Device of the models."""
    states: tuple[TrainState, ...]
    """The FP8 model, its BF16 baseline, or both in this order."""
    plan: Plan | None
    """The conversion plan of the FP8 model; None for a run in BF16 only."""
    loader: Loader
    """Training batches."""
    heldout: list[Batch]
    """The evaluation batches, `(inputs_BT, targets_BT)` on the CPU."""
    corpus: TokenFiles
    """The tokenized text."""
    statistics: CorpusStatistics
    """Statistics of the text."""
    end_of_document: int
    """Id that ends a document."""
    ranks: Ranks = SINGLE_PROCESS
    """The ranks of the run."""


def set_up(
    config: RunConfig, ranks: Ranks = SINGLE_PROCESS, *, resume: bool = False, began: Path | None = None
) -> Setup:
    """Prepare the text; build, convert and shard the models.

    Args:
        config: the run.
        ranks: its ranks.
        resume: do not read the weights of `run.start_from`: a checkpoint that is loaded next has all weights.
        began: directory of the run as it began, whose plan is kept (`as_planned`).

    Raises:
        CheckpointError: layers that the plan of the run has in FP8 cannot be here.
        ConfigError: unknown recipe or device, weights that the recipe cannot compute with, or steps that cannot be
            captured as a CUDA graph.
        DataError: a source without text, or with less than a batch.
    """
    recipe = recipes.load(config.run.recipe)
    recipes.load(config.run.last_recipe, "run.last_recipe")
    device = ranks.device or devices.use(config.run.device)
    policy_of(config, recipe)  # checks first: preparing the text takes longer
    graphs = Graphs() if replays(config, device, ranks) else None
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    text = ranks.first_per_host("text", lambda: _text(config, ranks))
    torch.manual_seed(config.run.seed)
    config_here = config.with_run(start_from="") if resume else config
    states, plan = make_states(config_here, device, ranks, graphs, began)
    if ranks.count > 1:
        torch.manual_seed(config.run.seed + ranks.rank)  # each rank draws for its own part
    return Setup(config, device, states, plan, *text, ranks)


def _text(config: RunConfig, ranks: Ranks) -> tuple[Loader, list[Batch], TokenFiles, CorpusStatistics, int]:
    data, run = config.data, config.run
    tokenizer = tokenizer_of(data)
    if tokenizer.vocab > config.model.vocab:
        raise ConfigError(
            f"model.vocab: {config.model.vocab} is too small for the tokenizer '{data.tokenizer}', which"
            f" needs {tokenizer.vocab}; leave model.vocab out."
        )
    files, separate = token_files(config, tokenizer), separator(config, tokenizer)
    own = run.batch // ranks.parts
    about: dict[str, Any] = {"source": files.source, "separate": separate}
    loader = Loader(files.train, own, data.sequence, run.seed, ranks.part, ranks.parts, **about)
    part = run.batch // run.accumulate
    heldout = list(heldout_batches(files.heldout, part, data.sequence, run.eval_tokens, **about))
    return loader, heldout, files, corpus_statistics(files, tokenizer), tokenizer.end_of_document


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a run, trained on first use; see `octavo.lab.data.load_tokenizer`."""
    return load_tokenizer(data.tokenizer, source=data.source, cache_dir=data.cache.expanduser())


def token_files(config: RunConfig, tokenizer: Tokenizer) -> TokenFiles:
    """Return the tokenized text of a run, prepared on first use; see `octavo.lab.data.prepare`."""
    data = config.data
    chat = ChatFormat.of(data.tokenizer, data.sequence) if data.format == "chat" else None
    begin = tokenizer.begin_of_document if config.separates_text else None
    return prepare(data.source, tokenizer, data.cache.expanduser(), data.heldout, chat=chat, begin=begin)


def separator(config: RunConfig, tokenizer: Tokenizer) -> int | None:
    """Return the id between documents of text that attention does not leave; None if it may, or files flag them."""
    return tokenizer.end_of_document if config.separates_text else None


def make_states(
    config: RunConfig,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
    graphs: Graphs | None = None,
    began: Path | None = None,
) -> tuple[tuple[TrainState, ...], Plan | None]:
    """Return the models in training, and the plan of the FP8 model.

    Both start from the same bits: the baseline is a copy made before weights are rounded or converted. With `graphs`,
    forward and backward are replayed; without, `run.graph` is not read. `began` is as of `set_up`.
    """
    start, lora, recipe = config.run.start_from, config.lora, recipes.load(config.run.recipe)
    with _allocating(config):
        model = build(config.model, config.run.seed, Path(start).expanduser() if start else None).to(device)
    baseline = copy.deepcopy(model) if config.run.baseline and recipe.is_fp8 else None
    cast_weights(config.run.weights, model)
    for each in [model, *([] if baseline is None else [baseline])] if lora.rank else []:
        add_lora(each, lora.rank, lora.alpha, lora.layers, config.run.seed)
    if not recipe.is_fp8:
        return (_state("bf16", model, config, device, ranks, graphs),), None
    plans = []
    policy, tokens = as_planned(config, model, recipe, ranks, began)
    if config.run.last_share:  # an error here comes before the first step, not after thousands
        plans.append(convert_as(config, model, recipes.load(config.run.last_recipe), ranks, policy, tokens))
    plans.append(plan := convert_as(config, model, recipe, ranks, policy, tokens))
    if config.run.scales and not any(map(_has_stored_scales, plans)):
        raise ConfigError("run.scales: a calibration file was given, and no layer has a recipe that keeps scales.")
    reads_values = ranks.count > 1 and config.run.leaves_recipe
    if reads_values:  # steps in BF16 read values, which a model gathers if it is sharded before it is converted
        revert(model)
    states = [_state("fp8", model, config, device, ranks, graphs)]
    if reads_values:
        plan = convert_as(config, model, recipe, ranks, policy, tokens)
    if baseline is not None:
        states.append(_state("bf16", baseline, config, device, ranks, graphs))
    return tuple(states), plan


@contextmanager
def _allocating(config: RunConfig) -> Iterator[None]:
    """Raise an allocator's error in this block as one of the configuration."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search(r"allocate|allocation|out of memory|overflow", str(error)):
            raise
        model = config.model
        raise ConfigError(
            f"model: {model.layers:,} layers of {model.dim:,} and a vocabulary of {model.vocab:,} do not fit in memory."
            " `octavo plan --memory` predicts what a run needs. Take a smaller model.dim, model.layers or model.vocab."
        ) from error


def convert_as(
    config: RunConfig,
    model: nn.Module,
    recipe: recipes.Recipe,
    ranks: Ranks = SINGLE_PROCESS,
    policy: Policy | None = None,
    tokens: int | None = None,
) -> Plan:
    """Convert a model of a run in place, with its tokens and, where a layer keeps scales, its calibration file.

    Args:
        config: the run.
        model: converted already, or not.
        recipe: recipe of the run, or one that refines some layers.
        ranks: ranks of the run.
        policy: by default `policy_of`.
        tokens: tokens of a forward pass, which decide what gains from FP8; by default those of the run.
    """
    policy, tokens = policy or policy_of(config, recipe), tokens or _tokens_per_pass(config, ranks)
    scales, allow = config.run.scales or None, config.run.allow_reference
    if scales and not _has_stored_scales(make_plan(model, recipe, policy=policy, tokens=tokens)):
        scales = None
    return convert(model, recipe, policy=policy, tokens=tokens, allow_reference=allow, scales=scales)


def with_bf16(recipe: recipes.Recipe, layers: Iterable[str]) -> recipes.Recipe:
    """Return a recipe with layers in BF16, by name, whatever else it says of them."""
    others = dict.fromkeys(layers, recipes.load("bf16"))
    return replace(recipe, modules=override(recipe.modules, others)) if others else recipe


def as_planned(
    config: RunConfig, model: nn.Module, recipe: recipes.Recipe, ranks: Ranks, began: Path | None
) -> tuple[Policy, int]:
    """Return the policy and the tokens of a forward pass that plan a run, as it began if it is resumed.

    The plan is part of the run: a resumed one keeps its layers in FP8 although other parts of a batch, ranks or another
    device would have others. On another device they are named one by one (`Policy.filter`).

    Args:
        config: the run.
        model: not converted.
        recipe: recipe of the run.
        ranks: ranks of the run.
        began: directory of the run as it began; None, or without a plan, for a new run.

    Raises:
        CheckpointError: a layer that is in FP8 by the plan of the run cannot be here.
        ConfigError: the plan of the run is damaged.
    """
    policy, tokens = policy_of(config, recipe), _tokens_per_pass(config, ranks)
    if began is None or not (file := began / "plan.json").is_file():
        return policy, tokens
    known = read_file(file)
    with blaming(file):
        tokens = int(known["tokens"])
        kept = {layer["name"] for layer in known["layers"] if "fp8" in layer["precision"]}
    if _fp8_layers(make_plan(model, recipe, policy=policy, tokens=tokens)) == kept:
        return policy, tokens
    policy = replace(policy, min_gain=0.0, filter=lambda name, _: name in kept)
    here = make_plan(model, recipe, policy=policy, tokens=tokens)
    if missing := sorted(kept - _fp8_layers(here)):
        why = {layer.name: layer.reason for layer in here.layers}.get(missing[0], "the model has no such layer")
        raise CheckpointError(
            f"{file}: layer '{missing[0]}' is in FP8 in this run, and cannot be here: {why}. Resume on a device like"
            " the one that it began on, or start a new run with another --out."
        )
    return policy, tokens


def _tokens_per_pass(config: RunConfig, ranks: Ranks) -> int:
    """Return the number of tokens of a forward pass of one rank."""
    return config.tokens_per_pass(ranks.parts) // ranks.parallel.context


def _fp8_layers(plan: Plan) -> set[str]:
    return {layer.name for layer in plan.layers if layer.is_fp8}


def trains_with(config: RunConfig, recipe: str) -> bool:
    """Return whether a run can be trained with another recipe. Creates no weights."""
    changed = config.with_run(recipe=recipe, baseline=False, start_from="", last_share=0.0)
    try:
        with torch.device("meta"):
            make_states(changed, torch.device("meta"))
    except (ConfigError, UnsupportedError):
        return False
    return True


def _has_stored_scales(plan: Plan) -> bool:
    return any(recipe.has_stored_scales for recipe in plan.recipes.values())


def policy_of(config: RunConfig, recipe: recipes.Recipe) -> Policy:
    """Return the conversion policy of the FP8 model of a run.

    Raises:
        ConfigError: FP8 weights for a recipe without FP8 layers.
    """
    fp8 = config.run.weights == "fp8"
    if fp8 and not recipe.is_fp8:
        raise ConfigError(f"run.weights: 'fp8' is for layers in FP8, and recipe '{recipe.name}' has none. Take 'bf16'.")
    run = config.run
    weights: Weights = "fp8" if fp8 else "unchanged"
    return Policy(min_gain=run.min_gain, memory=run.memory, bf16_blocks=run.bf16_blocks, weights=weights)


def cast_weights(weights: str, model: nn.Module) -> None:
    """Round parameters to BF16 unless `run.weights` is fp32; buffers keep their dtype."""
    for parameter in model.parameters() if weights != "fp32" else ():
        parameter.data = parameter.data.bfloat16()


def _state(
    name: str, model: nn.Module, config: RunConfig, device: torch.device, ranks: Ranks, graphs: Graphs | None
) -> TrainState:
    parallel = ranks.parallel
    auto = device.type == "cuda" and not parallel.splits_backward and parallel.context == 1
    compiled = {"on": True, "off": False, "auto": auto}[config.run.compile]
    if compiled:
        compile_blocks(model, blocks="layers.*", fullgraph=True)
    seed = config.run.seed + ranks.pipeline_rank  # stages must not draw the same rounding bits
    if parallel.pipeline == 1:
        return TrainState(name, model, config.optimizer, seed=seed, ranks=ranks, graphs=graphs)
    from octavo.lab.train.pipelined import PipelinedTrainState

    return PipelinedTrainState(name, model, config.optimizer, seed=seed, ranks=ranks)


def replays(config: RunConfig, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> bool:
    """Return True if forward and backward of a run are to be replayed as a CUDA graph.

    Raises:
        ConfigError: `run.graph` is `on`, but they cannot be.
    """
    parallel, several = ranks.parallel, ranks.count > 1
    against = ""
    if device.type != "cuda":
        against = f"the run is on a {device.type.upper()}"
    elif several and parallel.pipeline > 1:
        against = "the schedule of parallel.pipeline is Python's"
    elif parallel.context > 1:
        against = "attention over parallel.context is not captured"
    elif ranks.is_greedy:
        against = "parallel.zero = 'greedy' is not captured"
    if config.run.graph == "on" and against:
        raise ConfigError(f"run.graph: 'on', but {against}. Take 'auto' or 'off'.")
    return config.run.graph == "on" or (config.run.graph == "auto" and not several and not against)
