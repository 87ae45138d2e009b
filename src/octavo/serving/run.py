"""A run of `octavo train` into a directory that inference engines load: its newest weights, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.data import load_tokenizer
from octavo.recipes import load
from octavo.serving import compressed_tensors, fine_grained
from octavo.serving.exporting import Exported, export
from octavo.serving.tokenizer_files import tokenizer_files
from octavo.train.config import RunConfig
from octavo.train.load_run import find, model_of, settings_of


def export_run(
    run: Path,
    directory: Path,
    format: str = "",
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Exported:
    """Write what a run has trained; see `octavo.export`.

    Args:
        run: directory of a run, or of one of its checkpoints; of any number of ranks.
        format: by default that of the run's recipe.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: see `octavo.export`.
        DataError: the run's tokenizer is not there any more.
        UnsupportedError: see `octavo.export`.
    """
    found = find(run)
    config = settings_of(found, "octavo export", {"device": "cpu"})
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, source=data.source, cache_dir=data.cache.expanduser())
    texts = tokenizer_files(tokenizer, config.model.sequence)
    more = {"eos_token_id": tokenizer.end_of_document}
    model = model_of(found, config)
    return export(
        model, directory, format or format_of(config), dtype=dtype, overwrite=overwrite, config=more, texts=texts
    )


def format_of(config: RunConfig) -> str:
    """Return the format of a run's recipe: `fp8` for blocks, which more engines know by that name."""
    recipe = load(config.run.recipe)
    if not recipe.is_fp8:
        return "plain"
    blocks = recipe.fprop.is_fp8 and recipe.fprop.weight.granularity == "128x128"
    return fine_grained.NAME if blocks else compressed_tensors.NAME
