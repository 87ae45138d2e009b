"""`octavo train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from octavo._util import config_reader
from octavo._util.dist import is_first_rank
from octavo._util.terminal import console, program, say
from octavo.lab.cli.flags import COMMON, JsonOutput, Switch, configure, with_flags_of
from octavo.lab.train.config import RunConfig


@with_flags_of(RunConfig, COMMON)
def train(
    file: Path | None = None,
    /,
    *,
    preset: str | None = None,
    resume: Switch = False,
    overwrite: Switch = False,
    dry_run: Switch = False,
    json_output: JsonOutput = False,
    settings: Mapping[str, Any],
) -> int:
    """Train a model in FP8 and its BF16 baseline on the same batches, and compare them on held-out text.

    Settings come from a preset, then FILE, then flags; later ones override earlier ones. --help-all
    lists all of them.

    Examples:

        octavo train --preset demo               minutes, on a CPU or a GPU
        octavo train --preset tiny --recipe block
        octavo train my.toml --steps 500 --lr 6e-4
        octavo train runs/demo --resume
        torchrun --nproc-per-node 8 -m octavo train my.toml

    Parameters
    ----------
    file
        Run file, .toml or .json, or the directory of a run.
    preset
        demo (demo-cuda or demo-cpu, depending on the device), tiny, moe, parity-cuda, parity-10m-cuda,
        parity-350m-cuda, parity-1b-cuda or parity-moe-cuda. FILE overrides it.
    resume
        Resume from the last checkpoint, bit for bit.
    overwrite
        Replace an existing run.
    dry_run
        Print the resolved configuration and stop.
    """
    config = configure(file, preset, settings, resume=resume)
    _check_names(config, resume=resume)
    if dry_run:
        say(json.dumps(config_reader.to_dict(config), indent=2))
        return 0
    summary = _run(config, resume=resume, overwrite=overwrite, json_output=json_output)
    if json_output and is_first_rank():
        say(json.dumps(summary, indent=2))
    return 0


def _check_names(config: RunConfig, *, resume: bool) -> None:
    """Check what a run names before anything is read or built: its recipes and its source."""
    from octavo import recipes
    from octavo.lab.data.corpus import NAMED, open_corpus
    from octavo.lab.train.inputs import with_files

    named = with_files(config) if resume else config
    recipes.load(named.run.recipe)
    recipes.load(named.run.last_recipe, "run.last_recipe")
    if config.data.source not in NAMED:
        open_corpus(config.data.source)


def _run(config: RunConfig, *, resume: bool, overwrite: bool, json_output: bool) -> Mapping[str, Any]:
    from octavo.lab.train import train as run_training
    from octavo.lab.train.console import ConsoleReporter
    from octavo.lab.train.export import export_flags

    reporter = ConsoleReporter(console(stderr=json_output), program(), export_flags, keep=True)
    try:
        return run_training(config, reporters=[reporter], resume=resume, overwrite=overwrite)
    except KeyboardInterrupt as error:
        if is_first_rank():
            say(f"octavo: interrupted. {_resume_hint(config)}", to_stderr=True)
        sys.exit(getattr(error, "exit_code", 130))


def _resume_hint(config: RunConfig) -> str:
    from octavo.lab.train import checkpoint

    last = checkpoint.latest(config.run.out / "checkpoints")
    if last is None or not (config.run.out / "config.json").exists():
        return "There is no checkpoint yet; --checkpoint-every N writes one every N steps."
    return f"Resume from {last.name} with: {program()} train {quote(str(config.run.out))} --resume"
