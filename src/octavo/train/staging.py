"""What `[parallel] pipeline` can put into stages, and what it goes with: said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.torch_version import TorchVersion

from octavo import recipes
from octavo.errors import ConfigError
from octavo.train.config import RunConfig
from octavo.train.refusals import Refusal, refuse


def check_stages(config: RunConfig) -> None:
    """Check that `parallel.pipeline` ranks can have the blocks of a run in stages.

    Raises:
        ConfigError: they cannot; the message names the key to change.
    """
    ranks, parallel = config.parallel.pipeline, config.parallel
    if ranks == 1:
        return
    stages = ranks if parallel.schedule == "1f1b" else 2 * ranks
    if config.model.layers < stages:
        raise ConfigError(
            f"model.layers: {config.model.layers} blocks do not make {stages} stages (parallel.pipeline = {ranks},"
            f" parallel.schedule = '{parallel.schedule}'). Take {stages} or more, or fewer ranks."
        )
    if config.run.accumulate % ranks:
        raise ConfigError(
            f"run.accumulate: {config.run.accumulate} parts of a batch do not fill a pipeline of {ranks} ranks. Take a"
            f" multiple of {ranks}; {4 * ranks} leave few ranks idle."
        )
    refuse(_alone(config), f"parallel.pipeline = {ranks}")


def _alone(config: RunConfig) -> Iterator[Refusal]:
    """Yield what cannot be right where blocks are in stages."""
    model, run, optimizer, parallel = config.model, config.run, config.optimizer, config.parallel
    recipe = recipes.load(run.recipe)
    if model.architecture != "llama":
        yield Refusal("model.architecture", model.architecture, "only blocks of a Llama are put into stages", "'llama'")
    if model.tie_embeddings:
        yield Refusal("model.tie_embeddings", "true", "the embedding is the head too, in another stage", "false")
    if recipe.keeps_scales:
        why = "it keeps scales from step to step, of all layers together"
        yield Refusal("run.recipe", run.recipe, why, "'folded', 'rowwise', 'block' or 'tensorwise'")
    if parallel.goes_backward_by_parts:
        if run.compile == "on":
            why = f"'{parallel.schedule}' goes backward through a block by parts"
            yield Refusal("run.compile", "on", why, "'auto'")
        if TorchVersion(torch.__version__) < "2.13":
            why = f"PyTorch {torch.__version__} goes backward by parts in layers of its own only"
            yield Refusal("parallel.schedule", parallel.schedule, why, "'1f1b' or 'interleaved', or PyTorch 2.13")
    if optimizer.gradients != "wide":
        yield Refusal("optimizer.gradients", optimizer.gradients, "their norm is that of one stage", "'wide'")
