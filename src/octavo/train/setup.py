"""From a configuration to what a run works with: the device, the text, the lanes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.conversion import Plan, Policy, convert
from octavo.data import Loader, TokenFiles, heldout_batches, load_tokenizer, prepare
from octavo.errors import ConfigError
from octavo.models import build
from octavo.train import device as devices
from octavo.train.config import RunConfig
from octavo.train.lane import Lane

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of a run, before its first step."""

    config: RunConfig
    """As it was asked for."""
    device: torch.device
    """Where the lanes live."""
    lanes: tuple[Lane, ...]
    """The FP8 model, its BF16 twin, or both in this order."""
    plan: Plan | None
    """The conversion of the FP8 model; None for a run in BF16 alone."""
    loader: Loader
    """Training batches."""
    heldout: list[Batch]
    """The fixed evaluation batches, `(inputs_BT, targets_BT)` on the CPU."""
    corpus: TokenFiles
    """The text, tokenized and split."""


def set_up(config: RunConfig) -> Setup:
    """Prepare the text, build and convert the models.

    Raises:
        ConfigError: an unknown recipe or device.
        DataError: a source without text, or with less text than a batch.
    """
    recipe = recipes.load(config.run.recipe)
    device = devices.resolve(config.run.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    loader, heldout, corpus = _text(config)
    torch.manual_seed(config.run.seed)
    lanes, plan = _lanes(config, recipe, device)
    return Setup(config, device, lanes, plan, loader, heldout, corpus)


def _text(config: RunConfig) -> tuple[Loader, list[Batch], TokenFiles]:
    data, run = config.data, config.run
    cache = data.cache.expanduser()
    tokenizer = load_tokenizer(data.tokenizer, source=data.source, cache_dir=cache)
    if tokenizer.vocab > config.model.vocab:
        raise ConfigError(
            f"model.vocab: {config.model.vocab} is too small for the tokenizer '{data.tokenizer}', which"
            f" needs {tokenizer.vocab}; leave model.vocab out."
        )
    files = prepare(data.source, tokenizer, cache, data.heldout)
    loader = Loader(files.train, batch=run.batch, sequence=data.sequence, seed=run.seed)
    part = run.batch // run.accumulate
    heldout = list(heldout_batches(files.heldout, part, data.sequence, limit_tokens=run.eval_tokens))
    return loader, heldout, files


def _lanes(config: RunConfig, recipe: recipes.Recipe, device: torch.device) -> tuple[tuple[Lane, ...], Plan | None]:
    """Both lanes start from the same bits: the twin is a copy, made before the conversion."""
    model = build(config.model, config.run.seed).to(device)
    if not recipe.is_fp8:
        return (_lane("bf16", model, config, device),), None
    twin = copy.deepcopy(model) if config.run.twin else None
    tokens = config.run.batch // config.run.accumulate * config.data.sequence
    policy, scales = Policy(min_gain=config.run.min_gain), config.run.scales or None
    plan = convert(model, recipe, policy=policy, tokens=tokens, scales=scales)
    lanes = [_lane("fp8", model, config, device)]
    if twin is not None:
        lanes.append(_lane("bf16", twin, config, device))
    return tuple(lanes), plan


def _lane(name: str, model: nn.Module, config: RunConfig, device: torch.device) -> Lane:
    compiled = {"on": True, "off": False, "auto": device.type == "cuda"}[config.run.compile]
    if compiled:
        for block in model.get_submodule("layers").children():
            block.compile(fullgraph=True)
    return Lane(name, model, config.optimizer, seed=config.run.seed)
