"""Check that a checkpoint belongs to the run that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo.errors import CheckpointError
from octavo.monitor.store.reader import flat
from octavo.train.config import DataConfig, LoopConfig, OptimizerConfig, ParallelConfig, RunConfig

# Keys that may differ between a checkpoint and the resumed run: they do not affect the numbers, or only their last
# bits (ranks, parts of a batch). `steps` and `last_share` do through the schedule, but changing them is deliberate.
FREE = {
    "data.cache",
    "parallel.data",
    "parallel.pipeline",
    "parallel.schedule",
    "parallel.shard",
    "parallel.timeout",
    "run.accumulate",
    "run.checkpoint_every",
    "run.compile",
    "run.device",
    "run.eval_every",
    "run.eval_tokens",
    "run.graph",
    "run.keep",
    "run.last_recipe",
    "run.last_share",
    "run.log_every",
    "run.out",
    "run.price_per_kwh",
    "run.steps",
    "run.telemetry_every",
    "run.histograms_every",
    "run.tracker",
    "run.tracker_tensors",
}


def check_same_run(saved: Mapping[str, Any], config: RunConfig, where: Path) -> None:
    """Compare the configuration in a checkpoint with that of the run to resume.

    Raises:
        CheckpointError: they differ in a key that affects the numbers; the message names the first one.
    """
    # A key that is newer than the checkpoint had its default value.
    there, here = {**_defaults(), **flat(saved)}, flat(config_reader.to_dict(config))
    for key in [*here, *(there.keys() - here.keys())]:
        if key not in FREE and there.get(key) != here.get(key):
            raise CheckpointError(
                f"{where}: this is the checkpoint of another {_what(key)}: {key} is {there.get(key)!r} there"
                f" and {here.get(key)!r} here. Resume with the same, or start a new run with another --out."
            )


def _defaults() -> dict[str, Any]:
    sections = {"data": DataConfig(), "optimizer": OptimizerConfig(), "run": LoopConfig(), "parallel": ParallelConfig()}
    return flat({name: config_reader.to_dict(section) for name, section in sections.items()})


def _what(key: str) -> str:
    return {"model": "model", "data": "corpus"}.get(key.split(".")[0], "recipe" if key == "run.recipe" else "run")
