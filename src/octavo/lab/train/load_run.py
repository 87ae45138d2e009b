"""Load a run for inspection: set up as it was trained, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo._util.config_reader import blaming, merge, read_file
from octavo._util.recipe_names import BASE
from octavo.conversion import Plan, Policy
from octavo.errors import CheckpointError
from octavo.lab.guard.ladder import Ladder
from octavo.lab.train import checkpoint
from octavo.lab.train import device as devices
from octavo.lab.train.config import RunConfig, assemble
from octavo.lab.train.inputs import by_copies, copies
from octavo.lab.train.setup import Setup, convert_as, make_states, policy_of, set_up
from octavo.lab.train.state_tensors import restore_tensors
from octavo.lab.train.train_state import TrainState
from octavo.numerics import Granularity, Quantized, dequantize
from octavo.tensor import FP8Tensor

_ONE_MODEL = {"baseline": False, "compile": "off", "graph": "off", "last_share": 0.0}
"""Settings to load one model."""
_NO_START = {"run": {"start_from": ""}}
"""A checkpoint has all weights, and a stored configuration the shape, whatever is in the directory of these now."""


def find(run: Path, step: int | None = None) -> checkpoint.Checkpoint:
    """Return the checkpoint at `run`; for the directory of a run the newest one, or that of `step`.

    Raises:
        CheckpointError: there is none, or none of that step.
    """
    kept = [run] if (run / "state.json").exists() else checkpoint.find(run / "checkpoints")
    if not kept:
        raise CheckpointError(
            f"{run}: contains no checkpoint. Name the directory of a run of `octavo train`, which writes one at its"
            " end and every --checkpoint-every steps."
        )
    wanted = kept[-1].name if step is None else checkpoint.name_of(step)
    path = next((path for path in kept if path.name == wanted), None)
    if path is None:
        names = ", ".join(path.name for path in kept)
        raise CheckpointError(f"{run}: contains no checkpoint of step {step}. Checkpoints: {names}.")
    return checkpoint.load(path)


def settings_of(found: checkpoint.Checkpoint, where: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of the run for one model, not compiled or captured, with changes to its section `run`.

    Args:
        found: checkpoint of the run.
        where: the caller, for error messages.
        changes: keys of `run`.
    """
    saved = found.state["config"]
    config = assemble((str(found.path), merge(saved, _NO_START)), (where, {"run": {**_ONE_MODEL, **changes}}))
    return by_copies(config, saved["run"], found.run)


def restore(found: checkpoint.Checkpoint, config: RunConfig) -> Setup:
    """Return the setup of the run with the weights of the checkpoint, and the same layers in FP8 as in training.

    Raises:
        CheckpointError: it is of another model.
        DataError: the run's text no longer exists.
    """
    config = by_copies(config, found.state["config"]["run"], found.run)
    setup = set_up(config, resume=True)
    return replace(setup, plan=_restore(found, config, setup.states[0], setup.plan))


def states_of(found: checkpoint.Checkpoint, config: RunConfig) -> tuple[TrainState, ...]:
    """Return the trained models with the weights of the checkpoint, the BF16 baseline last if `run.baseline` is set.

    Raises:
        CheckpointError: it is of another model.
    """
    states, plan = make_states(config, devices.use(config.run.device))
    _restore(found, config, states[0], plan)
    for baseline in states[1:]:
        restore_tensors(baseline, found.tensors[baseline.name], found.path, optimizer=False)
    return states


def _restore(found: checkpoint.Checkpoint, config: RunConfig, state: TrainState, plan: Plan | None) -> Plan | None:
    """Load the weights of the checkpoint and convert the layers that were in FP8; return their plan."""
    policy = _policy_as_trained(found.run, config, plan)
    own, began = config.run.recipe, found.state["config"]["run"]
    last = found.state.get("recipe", began.get("recipe", BASE))
    last = {began[key]: copy for key, copy in copies(began, found.run).items()}.get(last, last)
    refined = _ladder(last, found.state.get("guard", {}).get("ladder", {}))
    if plan is not None and (policy is not None or last != own or refined.state_dict()):
        # Stored scales and the storage of weights are those of the recipes that the layers had.
        plan = convert_as(config, state.model, refined.recipe(), policy=policy)
    named = found.tensors[state.name]
    restore_tensors(state, {**named, **dict(_whole_rows(named))}, found.path, optimizer=False)
    if plan is not None and last != own:
        scales = found.run / "scales.json"  # of the last step by its own recipe
        config = config.with_run(scales=str(scales)) if scales.exists() else config
        ladder = _ladder(own)
        ladder.stay_in_bf16(refined.in_bf16(), found.step)
        plan = convert_as(config, state.model, ladder.recipe(), policy=policy)
    return plan


def _ladder(recipe: str, state: Mapping[str, Any] | None = None) -> Ladder:
    """Return the recipes of layers as guardrails have refined them, from the state in a checkpoint."""
    ladder = Ladder(recipes.load(recipe), quiet=0)
    ladder.load_state_dict(state or {})
    return ladder


def _policy_as_trained(run: Path, config: RunConfig, plan: Plan | None) -> Policy | None:
    """Return the policy that converts the layers that a run had in FP8; None if it has no plan."""
    known = run / "plan.json"
    if plan is None or not known.exists():
        return None
    with blaming(known):
        trained = {layer["name"] for layer in read_file(known)["layers"] if "fp8" in layer["precision"]}
    stored = policy_of(config, plan.recipe).weights
    return Policy(min_gain=0.0, filter=lambda name, layer: name in trained, weights=stored)


def without_weights(run: Path) -> tuple[nn.Module, RunConfig]:
    """Return the model of a run on the meta device, with the same layers in FP8 as in training, and its configuration.

    Raises:
        ConfigError: the configuration is damaged.
    """
    saved = read_file(run / "config.json")
    config = assemble((str(run / "config.json"), merge(saved, _NO_START)), ("", {"run": _ONE_MODEL}))
    config = by_copies(config, saved["run"], run)
    with torch.device("meta"):
        states, plan = make_states(config, torch.device("meta"))
        if policy := _policy_as_trained(run, config, plan):
            convert_as(config, states[0].model, recipes.load(config.run.recipe), policy=policy)
    return states[0].model, config


def _whole_rows(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield FP8 weights that were split within rows, with a scale per part, requantised with one scale per row."""
    for name, scale in named.items():
        weight = name.removesuffix(".scale")
        codes = named.get(f"{weight}.codes") if weight.startswith("model.") else None
        if weight != name and codes is not None and scale.shape[1] > 1:
            parts = Quantized(codes, scale, Granularity(1, codes.shape[1] // scale.shape[1]))
            whole = FP8Tensor.from_tensor(dequantize(parts, torch.float32))
            yield from ((f"{weight}.{part}", tensor) for part, tensor in whole.to_tensors().items())
