"""A run opened again for a look at its weights: set up as it was, with those of its newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.conversion import Policy, convert
from octavo.errors import CheckpointError
from octavo.strict import read_file
from octavo.train import checkpoint
from octavo.train.config import RunConfig, assemble
from octavo.train.setup import Setup, policy_of, set_up
from octavo.train.state import restore_lane


def find(run: Path) -> checkpoint.Checkpoint:
    """Return the checkpoint at `run`, or the newest of the run whose directory that is.

    Raises:
        CheckpointError: there is none.
    """
    if (run / "state.json").exists():
        return checkpoint.load(run)
    newest = checkpoint.latest(run / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{run}: holds no checkpoint. Name the directory of a run of `octavo train`.")
    return checkpoint.load(newest)


def settings_of(found: checkpoint.Checkpoint, where: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the run for one model, not compiled, with changes to its section `run`.

    Args:
        where: who asks, for messages.
    """
    run = {"twin": False, "compile": "off", **changes}
    return assemble((str(found.path), found.state["config"]), (where, {"run": run}))


def restore(found: checkpoint.Checkpoint, config: RunConfig) -> Setup:
    """Return the run set up with the weights of the checkpoint, the same layers in FP8 as when it was trained.

    Raises:
        CheckpointError: it is of another model.
        DataError: the run's text is not there any more.
    """
    setup = set_up(config)
    lane = setup.lanes[0]
    plan = found.path.parent.parent / "plan.json"
    if plan.exists() and setup.plan is not None:
        trained = {layer["name"] for layer in read_file(plan)["layers"] if "fp8" in layer["precision"]}
        stored = policy_of(config, setup.plan.recipe).weights
        policy = Policy(min_gain=0.0, filter=lambda name, layer: name in trained, weights=stored)
        setup = replace(setup, plan=convert(lane.model, setup.plan.recipe, policy=policy, tokens=setup.plan.tokens))
    named = found.tensors[lane.name].items()
    restore_lane(lane, {name: tensor for name, tensor in named if not name.startswith("optimizer.")}, found.path)
    return setup
