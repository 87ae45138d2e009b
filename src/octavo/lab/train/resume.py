"""Content of a run's checkpoints, and continuation from the newest one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo._util import config_reader
from octavo._util.config_reader import blaming
from octavo._util.recipe_names import BASE
from octavo._util.rng import generator_states, restore_generators
from octavo.errors import CheckpointError, DivergedError
from octavo.lab.loop import Loop
from octavo.lab.models.config import ModelConfig
from octavo.lab.monitor.system import versions
from octavo.lab.train import checkpoint
from octavo.lab.train.background import BackgroundWriter
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import Saved
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.inputs import are_same, check_recipes
from octavo.lab.train.state_tensors import place, restore_tensors, state_tensors
from octavo.lab.train.train_state import RunStep, TrainState

# Keys that may differ between a checkpoint and the resumed run: they do not affect the numbers, or only their last
# bits (ranks, parts of a batch). `steps` and `last_share` do through the schedule, but changing them is deliberate.
FREE = {
    "data.cache",
    "parallel.attention",
    "parallel.context",
    "parallel.data",
    "parallel.pipeline",
    "parallel.schedule",
    "parallel.shard",
    "parallel.timeout",
    "run.accumulate",
    "run.checkpoint_every",
    "run.checkpoint_write",
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
    "run.groups_every",
    "run.histograms_every",
    "run.tracker",
    "run.tracker_tensors",
    "sample.every",
    "sample.prompt",
    "sample.temperature",
    "sample.tokens",
}


def save_checkpoint(
    run: GuardedRun, loop: Loop[RunStep], checkpoints: Path, writer: BackgroundWriter | None = None
) -> None:
    """Write a checkpoint of a run into the folder `checkpoints`; with a writer, only copy it for the writer.

    Raises:
        CheckpointError: it cannot be written.
        DivergedError: a weight or an optimizer state is not finite; nothing is written.
    """
    config, ranks, setup = run.config, run.ranks, run.setup
    tensors = {state.name: state_tensors(state) for state in setup.states}
    faults = ((name, checkpoint.first_non_finite(named)) for name, named in tensors.items())
    fault = next((f"in the {name.upper()} model {text}" for name, text in faults if text), "")
    if fault := ranks.first_text(fault):
        raise DivergedError(
            f"after step {run.done}, {fault}: no checkpoint is written. {run.checkpoint_note()} Try a lower"
            " --lr, or --recipe bf16 to compare."
        )
    plain = {"config": config_reader.to_dict(config), "versions": versions(), **run.state_dict(), **loop.state_dict()}
    named = {**tensors, "random": generator_states()}
    if writer is not None:
        writer.save(checkpoints, run.done, named, plain, config.run.keep)
        return
    path = checkpoint.save(checkpoints, run.done, named, plain, keep=config.run.keep, ranks=ranks)
    run.log.emit(Saved(step=run.done, path=path))


def load_checkpoint(run: GuardedRun, loop: Loop[RunStep]) -> checkpoint.Checkpoint:
    """Load the newest checkpoint of a run into it and into the parts of its loop, and return that.

    Raises:
        CheckpointError: it cannot be read, or is of another run.
        NonFiniteError: it contains a NaN or infinite weight or optimizer state.
    """
    ranks, setup = run.ranks, run.setup
    newest = checkpoint.find(run.checkpoints)[-1]
    found = checkpoint.load(newest, ranks=ranks, place=None if ranks.count == 1 else partial(_place, setup.states))
    _check(found, run)
    with blaming(found.path / "state.json", CheckpointError):  # first: it converts layers to the recipes of the tensors
        run.load_state_dict(found.state)
        loop.load_state_dict(found.state)
    for state in setup.states:
        if state.name not in found.tensors:  # a baseline that had ended before
            state.drop_graph()
    setup.states = tuple(state for state in setup.states if state.name in found.tensors)
    for state in setup.states:
        with blaming(found.path, CheckpointError):
            own = {name: tensor for name, tensor in found.tensors[state.name].items() if state.holds(name)}
            restore_tensors(state, own, found.path)
    with blaming(found.path, CheckpointError):
        restore_generators(found.tensors["random"])
    return found


def _place(states: Iterable[TrainState], name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """Return memory for the checkpoint tensor `<model>.<name>`; None if this rank has no part of it."""
    model, _, own = name.partition(".")
    state = next(known for known in states if known.name == model)
    return place(state, own, shape, dtype) if state.holds(own) else None


def _check(found: checkpoint.Checkpoint, run: GuardedRun) -> None:
    """Check that a run can go on from a checkpoint."""
    ranks, steps = run.ranks, run.config.run.steps
    check_same_run(found.state["config"], run.config, found.path)
    check_recipes(found.state["config"]["run"], run.config)
    if ranks.is_greedy and found.state.get("ranks") != ranks.count:
        raise CheckpointError(
            f"{found.path}: with parallel.zero = 'greedy' each rank saved the states of its own tensors:"
            f" resume with {found.state.get('ranks')} ranks, not {ranks.count}."
        )
    if found.step > steps:
        raise CheckpointError(
            f"{found.path}: is past the end of this run of {steps} steps: take --steps above {found.step} to go on, or"
            " another --out for a shorter run."
        )


def check_same_run(saved: Mapping[str, Any], config: RunConfig, where: Path) -> None:
    """Compare the configuration in a checkpoint with that of the run to resume.

    Raises:
        CheckpointError: they differ in a key that affects the numbers; the message names the first one.
    """
    # A key that is newer than the checkpoint had its default value; the default recipe has changed.
    there, here = {**_defaults(), "run.recipe": BASE, **_by_key(saved)}, _by_key(config_reader.to_dict(config))
    for key in [*here, *(there.keys() - here.keys())]:
        section, _, name = key.partition(".")
        if section == "run" and are_same(name, there.get(key), config):
            continue
        if key not in FREE and there.get(key) != here.get(key):
            raise CheckpointError(
                f"{where}: this is the checkpoint of another {_what(key)}: {key} is {there.get(key)!r} there"
                f" and {here.get(key)!r} here. Resume with the same, or start a new run with another --out."
            )


def _by_key(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each setting by `section.key`. A table of patterns is one setting, whatever patterns it has."""
    return {f"{section}.{key}": value for section, settings in config.items() for key, value in settings.items()}


def _defaults() -> dict[str, Any]:
    """Return the settings that have a default, by `section.key`."""
    made = {
        f.name: config_reader.to_dict(f.default_factory()) for f in fields(RunConfig) if callable(f.default_factory)
    }
    model = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
    model |= {f.name: f.default_factory() for f in fields(ModelConfig) if callable(f.default_factory)}
    return _by_key({**made, "model": model})


def _what(key: str) -> str:
    return {"model": "model", "data": "corpus"}.get(key.split(".")[0], "recipe" if key == "run.recipe" else "run")
