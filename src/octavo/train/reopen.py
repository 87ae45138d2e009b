"""A run opened again for a look at its weights: set up as it was, with those of its newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.conversion import Plan, Policy
from octavo.errors import CheckpointError
from octavo.numerics import Granularity, Quantized, dequantize
from octavo.strict import read_file
from octavo.tensor import FP8Tensor
from octavo.train import checkpoint
from octavo.train import device as devices
from octavo.train.config import RunConfig, assemble
from octavo.train.lane import Lane
from octavo.train.setup import Setup, convert_as, make_lanes, policy_of, set_up
from octavo.train.state import restore_lane


def find(run: Path, step: int | None = None) -> checkpoint.Checkpoint:
    """Return the checkpoint at `run`; or of the run whose directory that is the newest, or the one after `step` steps.

    Raises:
        CheckpointError: there is none, or none of that step.
    """
    kept = [run] if (run / "state.json").exists() else checkpoint.find(run / "checkpoints")
    if not kept:
        raise CheckpointError(
            f"{run}: holds no checkpoint. Name the directory of a run of `octavo train`: it writes one at its end, and "
            "every --checkpoint-every steps."
        )
    wanted = kept[-1].name if step is None else checkpoint.name_of(step)
    path = next((path for path in kept if path.name == wanted), None)
    if path is None:
        names = ", ".join(path.name for path in kept)
        raise CheckpointError(f"{run}: holds no checkpoint of step {step}. What was kept: {names}.")
    return checkpoint.load(path)


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
    return replace(setup, plan=_restore(found, config, setup.lanes[0], setup.plan))


def model_of(found: checkpoint.Checkpoint, config: RunConfig) -> nn.Module:
    """Return the model that was trained, with the weights of the checkpoint; `restore` without the text.

    Raises:
        CheckpointError: it is of another model.
    """
    return lanes_of(found, config)[0].model


def lanes_of(found: checkpoint.Checkpoint, config: RunConfig) -> tuple[Lane, ...]:
    """Return what was trained, with the weights of the checkpoint: with `run.twin` the BF16 twin too, after the model.

    Raises:
        CheckpointError: it is of another model.
    """
    recipe, device = recipes.load(config.run.recipe), devices.resolve(config.run.device)
    lanes, plan = make_lanes(config, recipe, device)
    _restore(found, config, lanes[0], plan)
    for twin in lanes[1:]:
        restore_lane(twin, _without_optimizer(found, twin), found.path)
    return lanes


def _restore(found: checkpoint.Checkpoint, config: RunConfig, lane: Lane, plan: Plan | None) -> Plan | None:
    """Give a lane the weights of the checkpoint, and the layers in FP8 that it was trained with; return their plan."""
    known = found.path.parent.parent / "plan.json"
    if known.exists() and plan is not None:
        trained = {layer["name"] for layer in read_file(known)["layers"] if "fp8" in layer["precision"]}
        stored = policy_of(config, plan.recipe).weights
        policy = Policy(min_gain=0.0, filter=lambda name, layer: name in trained, weights=stored)
        plan = convert_as(config, lane.model, plan.recipe, policy=policy)
    named = _without_optimizer(found, lane)
    restore_lane(lane, {**named, **dict(_whole_rows(named))}, found.path)
    return plan


def _without_optimizer(found: checkpoint.Checkpoint, lane: Lane) -> dict[str, Tensor]:
    return {name: t for name, t in found.tensors[lane.name].items() if not name.startswith("optimizer.")}


def _whole_rows(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield FP8 weights whose rows were cut over ranks, each part with a scale of its own, with one scale a row."""
    for name, scale in named.items():
        weight = name.removesuffix(".scale")
        codes = named.get(f"{weight}.codes")
        if weight != name and codes is not None and scale.shape[1] > 1:
            parts = Quantized(codes, scale, Granularity(1, codes.shape[1] // scale.shape[1]))
            whole = FP8Tensor.from_tensor(dequantize(parts, torch.float32))
            yield from ((f"{weight}.{part}", tensor) for part, tensor in whole.to_tensors().items())
